#!/usr/bin/env bash
# GSPO with the clip range and aggregation of its paper, as verl's examples set them.
loss_mode=gspo
clip_ratio_low=0.0003
clip_ratio_high=0.0004
args=(
    algorithm.adv_estimator=grpo
    actor_rollout_ref.actor.policy_loss.loss_mode=${loss_mode}
    actor_rollout_ref.actor.clip_ratio_low=${clip_ratio_low}
    actor_rollout_ref.actor.clip_ratio_high=${clip_ratio_high}
    actor_rollout_ref.actor.clip_ratio_c=10.0
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
    actor_rollout_ref.actor.use_kl_loss=false
    actor_rollout_ref.actor.kl_loss_coef=0.0
    actor_rollout_ref.actor.strategy=fsdp
)
python3 -m verl.trainer.main_ppo "${args[@]}" \
    data.train_files='["/data/gsm8k/train.parquet", "/data/math/train.parquet"]' \
    data.val_files=/data/gsm8k/test.parquet \
    data.shuffle=True \
    data.train_batch_size=512 \
    data.max_prompt_length=2048 \
    data.max_response_length=8192 \
    actor_rollout_ref.model.path=/models/Qwen3-8B \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=10240 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.05 \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.multi_turn.enable=False \
    actor_rollout_ref.model.lora_rank=0 \
    trainer.total_training_steps=500 \
    trainer.total_epochs=10 \
    trainer.n_gpus_per_node=8 2>&1 | tee gspo.log
