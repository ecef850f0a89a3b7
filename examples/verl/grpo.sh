#!/bin/sh
# GRPO with verl on GPUs, rollouts on GPUs of their own, weights by refitd. Not run here: it needs 4 GPUs.
#
#   ROOT=/mnt/weights MODEL=/models/Qwen2.5-1.5B-Instruct DATA=/data/gsm8k examples/verl/grpo.sh
#   ROLLOUT=vllm …           # vLLM in the place of SGLang: 0.27.1 or later
#
# It wants verl with its extra: pip install 'verl[verl-core]==0.9.1' (separate_async imports its TransferQueue).
# The last four lines are refitd's part. Start the service first, on the host of the rollouts or on one that reaches
# them; verl's servers listen on the host's address, not on loopback:
#
#   refitd serve --root /mnt/weights --base-model /models/Qwen2.5-1.5B-Instruct --engine-allow '10.0.0.0/8'
set -eu
: "${ROOT:?}" "${MODEL:?}" "${DATA:?}"
engine=actor_rollout_ref.rollout.checkpoint_engine
export VLLM_SERVER_DEV_MODE=1 # vLLM has its routes for weights only with it
exec python -m verl.trainer.main_ppo \
  data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" data.train_batch_size=64 \
  actor_rollout_ref.model.path="$MODEL" actor_rollout_ref.actor.strategy=fsdp2 \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
  actor_rollout_ref.rollout.name="${ROLLOUT:-sglang}" actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.load_format=auto \
  actor_rollout_ref.rollout.nnodes=1 actor_rollout_ref.rollout.n_gpus_per_node=2 \
  actor_rollout_ref.hybrid_engine=False algorithm.adv_estimator=grpo \
  trainer.v1.trainer_mode=separate_async trainer.v1.separate_async.parameter_sync_step=1 \
  trainer.nnodes=1 trainer.n_gpus_per_node=2 trainer.logger=console hydra.run.dir=build/verl-outputs \
  actor_rollout_ref.rollout.free_cache_engine=False ++actor_rollout_ref.rollout.enable_sleep_mode=False \
  "$engine.backend=refitd" "$engine.custom_backend_module=refitd_client.trainers.verl" \
  "+$engine.engine_kwargs.refitd.root=$ROOT" "+$engine.engine_kwargs.refitd.run=grpo/trial" \
  "+$engine.engine_kwargs.refitd.service_url=${REFITD_URL:-http://127.0.0.1:8700}" \
  "$@"
