"""A router's pure parts without a router: records, and policy with everything that it stands on."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from rankway import native
from rankway.blocks import pack_tokens
from rankway.ranks import DpRange, GlobalRank, Target
from rankway.registry.records import Put, Record, State
from rankway.router.eligibility import Eligibility
from rankway.router.fleet import Fleet
from rankway.router.ledger import NO_LIMITS, Ledger, RecentTerm, SlotLimits
from rankway.router.policy import Policy, PolicySettings, Prompt
from rankway.router.targets import Holder, Targets


def a_record(worker_id: str = "w1", start_rank: int = 0, size: int = 4, **fields: object) -> Record:
    """A READY worker of model "m" in group "g" of 8 ranks, block size 16."""
    given = {
        "worker_id": worker_id,
        "epoch": 1,
        "endpoint": "127.0.0.1:1",
        "model": "m",
        "dp_group": "g",
        "data_parallel_size": 8,
        "window": DpRange(start_rank, size),
        "block_size": 16,
        "total_kv_blocks": 158788,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "max_model_len": 4096,
        "vocab_size": 512,
        "engine": "sim",
        "state": State.READY,
        "tokenizer": "bytes",
    }
    return Record(**(given | fields))  # type: ignore[arg-type]


@dataclass
class Parts:
    """A policy over a fleet, whose targets are all known and connected."""

    settings: PolicySettings = field(default_factory=PolicySettings)
    recent: RecentTerm = field(default_factory=RecentTerm)

    def __post_init__(self) -> None:
        self.fleet, self.targets, self.index = Fleet(), Targets(), native.open_index()
        self.ledger = Ledger(self.recent)
        self.eligibility = Eligibility(self.fleet, self.targets)
        self.policy = Policy(self.settings, self.fleet, self.targets, self.eligibility, self.ledger, self.index)

    def join(self, record: Record, *, connected: bool = True, limits: SlotLimits = NO_LIMITS) -> None:
        self.fleet.apply(Put(record))
        for rank in record.ranks:
            slot = self.targets.hold(Target(record.worker_id, rank), record.epoch, Holder.FLEET)
            self.ledger.open(slot, limits)
            self.ledger.loads.known[slot] = 1
        self.eligibility.changed()
        if connected:
            self.eligibility.connect(record.instance)

    def slot(self, worker_id: str, dp_rank: int, epoch: int = 1) -> int:
        slot = self.targets.find(Target(worker_id, GlobalRank(dp_rank)), epoch)
        assert slot is not None
        return slot


def a_prompt(tokens: Sequence[int] | int, **fields: object) -> Prompt:
    """A prompt of these tokens, or of so many."""
    ids = array("I", range(100, 100 + tokens)) if isinstance(tokens, int) else array("I", tokens)
    return Prompt(pack_tokens(ids), **fields)  # type: ignore[arg-type]
