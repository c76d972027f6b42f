# GPG, as verl's example has it: the estimator with its own loss, without a reference.
set -x
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=gpg \
    data.train_files="['/data/gsm8k/train.parquet', '/data/math/train.parquet']" \
    data.val_files=/data/gsm8k/test.parquet \
    data.train_batch_size=1024 data.max_prompt_length=1024 data.max_response_length=1024 \
    actor_rollout_ref.model.path=/models/Qwen2-7B-Instruct \
    actor_rollout_ref.actor.policy_loss.loss_mode=gpg \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000 \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.rollout.n=5 \
    algorithm.norm_adv_by_std_in_grpo=False \
    algorithm.use_kl_in_reward=False \
    trainer.total_epochs=15 $@
