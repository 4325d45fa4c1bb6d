#!/usr/bin/env bash
# "External load balancing" of a dense model: N independent engines. vLLM has no external LB for dense models, so each engine believes
# that it is rank 0 of 1, and Rankway assigns the global ranks by its own options. Four of them on one host:
#
#   for rank in 0 1 2 3; do CUDA_VISIBLE_DEVICES=$rank ./dense-independent.sh $rank & done; wait
#
# Nothing here has a fixed port, and no engine waits for another: they may start, fail and restart one by one.
set -euo pipefail
rank=${1:?global rank: 0 to 3}
HEAD=${HEAD:-127.0.0.1}

exec ${RANKWAY:-rankway} worker --engine vllm --model "${MODEL:-Qwen/Qwen3-8B}" --dp-group qwen3 --worker-id "rank-$rank" \
  --nats-url "nats://$HEAD:4222" --registry-endpoints "$HEAD:50052" \
  --data-parallel-size 4 --start-rank "$rank" --size 1
