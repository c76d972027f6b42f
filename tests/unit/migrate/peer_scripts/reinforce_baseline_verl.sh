# REINFORCE++-baseline in verl.
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=reinforce_plus_plus_baseline \
    data.train_files=/data/train.parquet data.val_files=/data/test.parquet \
    data.train_batch_size=1024 data.max_prompt_length=1024 data.max_response_length=1024 \
    actor_rollout_ref.model.path=/models/qwen \
    actor_rollout_ref.actor.optim.lr=3e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=1024 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=mse \
    actor_rollout_ref.rollout.n=8 \
    trainer.total_epochs=15
