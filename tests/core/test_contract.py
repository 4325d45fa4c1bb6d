"""What the index, the active blocks and the choice promise, for the pure and the compiled core alike."""

from __future__ import annotations

import gc
import sys
import threading
from array import array
from collections import Counter
from typing import Any

import pytest

from rankway import blocks
from rankway.choice import LoadTable, Weights
from rankway.index import MAX_SLOTS

CHAIN = [11, 22, 33, 44]


def idle(slots: int) -> LoadTable:
    loads = LoadTable()
    loads.grow(slots)
    for slot in range(slots):
        loads.eligible[slot] = loads.known[slot] = 1
    return loads


def test_a_match_is_the_run_of_leading_blocks(core: Any) -> None:
    """A hole ends a slot's match, whatever it holds after it; without block 0 a slot isn't there."""
    index = core.Index()
    index.store(0, CHAIN)
    index.store(1, [11, 22, 44])
    index.store(2, [22, 33, 44])
    index.store(MAX_SLOTS - 1, [11])
    assert index.match(CHAIN) == {0: 4, 1: 2, MAX_SLOTS - 1: 1}
    assert index.match([]) == {}
    assert index.match([99, *CHAIN]) == {}


def test_match_into_fills_a_buffer_by_slot(core: Any) -> None:
    """`match_into` writes every item: 0 where there is no match; slots beyond the end are left out; lists are taken too."""
    index = core.Index()
    index.store(1, CHAIN)
    index.store(5, CHAIN)
    overlaps: Any
    for overlaps in (array("I", [9] * 4), [9] * 4):
        index.match_into(CHAIN, overlaps)
        assert list(overlaps) == [0, 4, 0, 0]


def test_counts_tell_what_changed(core: Any) -> None:
    """Store, remove and clear return how many blocks changed; unknown blocks don't stop the rest."""
    index = core.Index()
    assert index.store(3, [*CHAIN, 11]) == 4
    assert index.store(3, [44, 55]) == 1
    assert index.remove(3, [99, 11, 98, 22]) == 2
    assert index.remove(4, CHAIN) == 0
    assert index.size(3) == 3
    assert index.clear(3) == 3
    assert index.clear(3) == 0
    assert len(index) == 0


def test_a_removal_leaves_other_slots_alone(core: Any) -> None:
    """A block leaves one slot only, and the index only with its last holder."""
    index = core.Index()
    for slot in range(200):
        index.store(slot, CHAIN)
    for slot in range(199):
        index.remove(slot, CHAIN)
        assert index.match(CHAIN) == dict.fromkeys(range(slot + 1, 200), 4)
        assert len(index) == 4
    index.remove(199, CHAIN)
    assert len(index) == 0
    assert index.match(CHAIN) == {}


def test_a_cleared_slot_starts_anew(core: Any) -> None:
    """After `clear` a slot holds nothing, and what it stores then is all it holds."""
    index = core.Index()
    index.store(0, range(3000))
    index.store(1, range(1500))
    assert index.clear(0) == 3000
    assert (index.size(0), index.digest(0), index.blocks(0)) == (0, 0, b"")
    assert not index.contains(0, 7)
    assert index.match([0, 1]) == {1: 2}
    index.store(0, [1, 0])
    assert index.match([0, 1]) == {0: 2, 1: 2}
    assert len(index) == 1500
    assert sorted(blocks.unpack_hashes(index.blocks(0))) == [0, 1]


def test_the_blocks_of_several_slots(core: Any) -> None:
    """`blocks_of` gives each slot's blocks in the order of the slots, nothing for slots that hold nothing, and no slot twice."""
    index = core.Index()
    held: dict[int, range] = {7: range(3000), 2: range(1000, 1010), 900: range(5, 6), 3: range(0)}
    for slot in range(10, 90):
        index.store(slot, range(200))
    for slot, chain in held.items():
        index.store(slot, chain)
    index.store(4, range(50))
    index.clear(4)
    slots = [900, 3, 7, 4, 2, 50, 1_000_000]
    found = [sorted(blocks.unpack_hashes(packed)) for packed in index.blocks_of(slots)]
    assert found == [list(held.get(slot, range(200) if slot == 50 else ())) for slot in slots]
    assert index.blocks_of([]) == []
    with pytest.raises(ValueError, match="7 is there twice"):
        index.blocks_of([7, 2, 7])
    with pytest.raises((ValueError, TypeError)):
        index.blocks_of([1, "x"])


def test_the_digest_is_the_xor_of_mixed_hashes(core: Any) -> None:
    """The digest depends on the set alone, not on the order or the way to it."""
    index = core.Index()
    index.store(0, CHAIN)
    index.store(1, [*reversed(CHAIN), 5])
    index.remove(1, [5])
    expected = 0
    for h in CHAIN:
        expected ^= blocks.mix(h)
    assert index.digest(0) == index.digest(1) == expected
    assert index.digest(2) == 0


@pytest.mark.parametrize(
    "values",
    [
        [0, 1, 2**64 - 1, 2**30, 2**60],
        (0, 1, 2**64 - 1, 2**30, 2**60),
        array("Q", [0, 1, 2**64 - 1, 2**30, 2**60]),
        blocks.pack_hashes([0, 1, 2**64 - 1, 2**30, 2**60]),
        bytearray(blocks.pack_hashes([0, 1, 2**64 - 1, 2**30, 2**60])),
        memoryview(array("Q", [0, 1, 2**64 - 1, 2**30, 2**60])),
        memoryview(b"x" + blocks.pack_hashes([0, 1, 2**64 - 1, 2**30, 2**60]))[1:],
        {0: "a", 1: "b", 2**64 - 1: "c", 2**30: "d", 2**60: "e"}.keys(),
        memoryview(array("Q", [0, 9, 1, 9, 2**64 - 1, 9, 2**30, 9, 2**60, 9]))[::2],
    ],
    ids=lambda values: type(values).__name__,
)
def test_hashes_of_every_kind_are_taken(core: Any, values: Any) -> None:
    """Numbers, arrays and packed hashes mean the same, aligned or not."""
    index = core.Index()
    assert index.store(0, values) == 5
    assert sorted(blocks.unpack_hashes(index.blocks(0))) == [0, 1, 2**30, 2**60, 2**64 - 1]


@pytest.mark.parametrize(
    "hashes", [[-1], [2**64], [1.5], ["1"], [None], "12345678", b"1234567", None, 7, array("d", [1.0]), memoryview(b"123")]
)
def test_hashes_that_are_none_are_refused(core: Any, hashes: Any) -> None:
    """Anything but whole numbers of 64 bits is a ValueError, and nothing is stored."""
    index, active = core.Index(), core.ActiveBlocks()
    for call in (index.store, index.remove, active.acquire, active.release):
        with pytest.raises(ValueError, match=r"no multiple|not all"):
            call(0, hashes)
    with pytest.raises(ValueError, match=r"no multiple|not all"):
        index.match(hashes)
    assert index.size(0) == active.active(0) == 0


@pytest.mark.parametrize("slot", [-1, MAX_SLOTS, 2**70, -(2**70)])
def test_slots_outside_the_range_are_refused(core: Any, slot: int) -> None:
    """A slot outside 0 … 2^20-1 is a ValueError that names it."""
    index, active = core.Index(), core.ActiveBlocks()
    for call in (index.store, index.remove, active.acquire, active.release):
        with pytest.raises(ValueError, match=f"slot={slot}"):
            call(slot, [1])
    for query in (index.clear, index.size, index.digest, index.blocks, active.active, active.clear):
        with pytest.raises(ValueError, match=f"slot={slot}"):
            query(slot)


@pytest.mark.parametrize("slot", [1.0, "1", None])
def test_slots_that_are_no_numbers_are_type_errors(core: Any, slot: Any) -> None:
    """A slot of another type is a TypeError."""
    with pytest.raises(TypeError):
        core.Index().store(slot, [1])
    with pytest.raises(TypeError):
        core.Index().size(slot)


@pytest.mark.parametrize("tokens", [[-1], [2**32], [0.5], ["a"], "abcd", b"123", None])
def test_tokens_that_are_none_are_refused(core: Any, tokens: Any) -> None:
    """Anything but whole numbers of 32 bits is a ValueError."""
    with pytest.raises(ValueError, match=r"no multiple|not all"):
        core.hash_chain(tokens, 16, 0)


@pytest.mark.parametrize(("block_size", "root"), [(0, 0), (-3, 0), (16, -1), (16, 2**64)])
def test_chain_parameters_are_checked(core: Any, block_size: int, root: int) -> None:
    """A block size below 1 and a root outside 64 bits are ValueErrors."""
    with pytest.raises(ValueError, match=r"block_size|root"):
        core.hash_chain([1], block_size, root)


def test_extra_keys_cover_every_full_block(core: Any) -> None:
    """Fewer extra keys than full blocks are refused; more are let be; what is no bytes is a TypeError."""
    with pytest.raises(ValueError, match="1 extra keys for 2 blocks"):
        core.hash_chain(range(32), 16, 0, [b"x"])
    assert len(core.hash_chain(range(31), 16, 0, extra_keys=[b"x", b"y"])) == 8
    with pytest.raises(TypeError):
        core.hash_chain(range(16), 16, 0, ["x"])
    assert core.hash_chain(range(16), 2**70, 0) == b""


def test_active_blocks_are_counted(core: Any) -> None:
    """A block stays active until its last user has released it, per slot."""
    active = core.ActiveBlocks()
    assert active.acquire(0, CHAIN) == 4
    assert active.acquire(0, CHAIN[:2]) == 0
    assert active.acquire(1, CHAIN[:1]) == 1
    assert active.release(0, CHAIN) == 2
    assert (active.active(0), active.overlap(0, CHAIN), active.overlap(1, CHAIN)) == (2, 2, 1)
    assert active.release(0, CHAIN) == 2
    assert active.release(0, CHAIN) == 0
    assert (active.active(0), active.active(1)) == (0, 1)
    active.acquire(1, [11])
    assert active.clear(1) == 1
    assert active.release(1, [11]) == 0


def test_the_choice_prefers_what_is_cached_then_what_is_idle(core: Any) -> None:
    """The formula's example: 196 tokens cost 24.25 on idle slots, 12.25 where their 12 blocks are cached."""
    index, active, loads = core.Index(), core.ActiveBlocks(), idle(8)
    tokens = list(range(196))
    hashes = core.hash_chain(tokens, 16, 5)
    first = core.choose(index, active, hashes, 196, 16, loads, Weights(), 1)
    assert first.cost == 24.25
    index.store(6, hashes)
    assert core.choose(index, active, hashes, 196, 16, loads, Weights(), 2) == (6, 12.25, 12)
    assert core.choose_for_tokens(index, active, tokens, 16, 5, loads, Weights(), 2) == ((6, 12.25, 12), hashes)
    loads.known[6] = 0
    assert core.choose(index, active, hashes, 196, 16, loads, Weights(), 2).overlap_blocks == 0
    loads.known[6] = 1
    loads.eligible[6] = 0
    assert core.choose(index, active, hashes, 196, 16, loads, Weights(), 2).slot != 6
    loads.eligible[:] = bytes(8)
    assert core.choose(index, active, hashes, 196, 16, loads, Weights(), 2) is None


def test_one_token_is_always_prefilled(core: Any) -> None:
    """A prompt of full blocks that are all cached still prefills its last block."""
    index, loads = core.Index(), idle(1)
    hashes = core.hash_chain(range(48), 16, 0)
    index.store(0, hashes)
    assert core.choose(index, core.ActiveBlocks(), hashes, 48, 16, loads, Weights(), 0) == (0, 1.0 + 3, 2)


def test_active_blocks_of_a_prompt_cost_no_decode_blocks_twice(core: Any) -> None:
    """Blocks of the prompt that requests on the slot already use are counted once."""
    active, loads = core.ActiveBlocks(), idle(2)
    hashes = core.hash_chain(range(64), 16, 0)
    active.acquire(1, hashes[:16])
    loads.decode_blocks[0] = loads.decode_blocks[1] = 2
    assert core.choose(core.Index(), active, hashes, 64, 16, loads, Weights(), 0) == (1, 4.0 + 2 + 4 - 2, 0)


def test_ties_are_shared_evenly(core: Any) -> None:
    """Equal slots are each picked about equally often; a larger tree loses the tie."""
    index, active, loads = core.Index(), core.ActiveBlocks(), idle(5)
    index.store(4, [1, 2, 3])
    picks = Counter(core.choose(index, active, [], 8, 16, loads, Weights(), seed).slot for seed in range(4000))
    assert sorted(picks) == [0, 1, 2, 3]
    assert min(picks.values()) > 850


def test_temperature_spreads_by_cost(core: Any) -> None:
    """With a temperature the cheapest is picked most often, and the dearest sometimes."""
    index, active, loads = core.Index(), core.ActiveBlocks(), idle(3)
    loads.decode_blocks[1], loads.decode_blocks[2] = 5, 10
    weights = Weights(temperature=0.5)
    picks = Counter(core.choose(index, active, [], 8, 16, loads, weights, seed).slot for seed in range(3000))
    assert picks[0] > picks[1] > picks[2] > 100


@pytest.mark.parametrize("column", ["known", "prefill_tokens", "decode_blocks", "recent"])
def test_short_columns_are_refused(core: Any, column: str) -> None:
    """A load table whose columns differ in length is a ValueError, never a read beyond the end."""
    loads = idle(4)
    setattr(loads, column, getattr(loads, column)[:3])
    with pytest.raises(ValueError, match="loads"):
        core.choose(core.Index(), core.ActiveBlocks(), [], 1, 16, loads, Weights(), 0)


def test_buffers_are_free_again_after_a_choice(core: Any) -> None:
    """A choice keeps no hold of the load table: it can grow at once."""
    index, active, loads = core.Index(), core.ActiveBlocks(), idle(4)
    core.choose(index, active, [], 1, 16, loads, Weights(), 0)
    loads.grow(64)
    assert len(loads) == 64


def test_arguments_are_taken_by_name(core: Any) -> None:
    """Every function takes its arguments by name too, and refuses others."""
    index = core.Index()
    assert index.store(slot=0, hashes=[1, 2]) == 2
    assert index.contains(slot=0, block_hash=1)
    assert core.hash_chain(tokens=[1] * 16, block_size=16, root=0) == core.hash_chain([1] * 16, 16, 0, extra_keys=None)
    with pytest.raises(TypeError):
        index.store(slot=0)
    with pytest.raises(TypeError):
        index.store(0, [1], nonsense=2)
    with pytest.raises(TypeError):
        index.store(0, [1], hashes=[2])
    with pytest.raises(TypeError):
        index.store(0, [1], 2)


def test_memory_returns_to_where_it_began(core: Any) -> None:
    """Rounds of storing and removing, by removal and by clear, leave the index as large as it was."""
    index = core.Index()
    index.store(0, [1])
    sizes = []
    for round_number in range(6):
        for slot in range(4):
            for start in range(0, 8192, 64):
                index.store(slot, range(start, start + 64))
        for start in range(0, 8192, 64):
            index.remove(0, range(start, start + 64))
        for slot in range(1, 4):
            index.clear(slot)
        assert len(index) == 0
        for _ in range(64):
            index.store(0, [1])
        sizes.append(index.memory_bytes())
        assert len(index) == 1, round_number
    assert max(sizes[1:]) <= sizes[0] + 4096


def test_threads_may_share_an_index(core: Any) -> None:
    """Calls from several threads, long ones included, leave a state that some order of them explains."""
    index = core.Index()
    long = array("Q", range(40_000))

    def work(slot: int) -> None:
        for _ in range(8):
            index.store(slot, long)
            index.match(long)
            index.store(slot + 10, [slot])
            index.blocks_of([slot, slot + 10])
            index.remove(slot, long)
            len(index)
        index.store(slot, long[:100])

    threads = [threading.Thread(target=work, args=(slot,)) for slot in range(2 if core.Index.__name__ == "PureIndex" else 4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        if core.Index.__name__ == "PureIndex":
            for thread in threads:  # the twin is for one thread
                thread.start()
                thread.join()
        else:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)
    for slot in range(len(threads)):
        assert index.size(slot) == 100
        assert sorted(blocks.unpack_hashes(index.blocks(slot))) == list(range(100))
    assert len(index) == 100


def test_no_object_is_kept_or_lost(core: Any) -> None:
    """References are balanced: calls, good and bad, leave the count of living objects where it was."""
    index, active, loads = core.Index(), core.ActiveBlocks(), idle(4)
    tokens = [300 + i for i in range(64)]
    hashes = list(blocks.unpack_hashes(core.hash_chain(tokens, 16, 0)))

    def calls() -> None:
        index.store(1, hashes)
        active.acquire(1, hashes)
        core.choose_for_tokens(index, active, tokens, 16, 0, loads, Weights(), 1)
        index.match(hashes)
        for bad in ([-1], ["x"], None, b"1"):
            for call in (index.match, lambda value: index.store(0, value), lambda value: core.hash_chain(value, 16, 0)):
                with pytest.raises(ValueError, match="no"):
                    call(bad)
        active.release(1, hashes)
        index.clear(1)

    calls()
    gc.collect()
    before = [sys.getrefcount(item) for item in (*hashes, *tokens, tokens, hashes)]
    for _ in range(50):
        calls()
    gc.collect()
    assert [sys.getrefcount(item) for item in (*hashes, *tokens, tokens, hashes)] == before
