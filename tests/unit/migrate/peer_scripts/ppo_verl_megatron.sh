# PPO with a critic on verl's Megatron backend, by tensor and pipeline parallelism.
python3 -m verl.trainer.main_ppo --config-path=./config --config-name='ppo_megatron_trainer.yaml' \
    algorithm.adv_estimator=gae \
    algorithm.lam=0.95 \
    data.train_files=/data/train.parquet data.val_files=/data/test.parquet \
    data.train_batch_size=1024 data.max_prompt_length=1024 data.max_response_length=2048 \
    actor_rollout_ref.model.path=/models/qwen \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 \
    actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2 \
    actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=2 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    critic.optim.lr=1e-5 \
    critic.optim.lr_warmup_steps_ratio=0.05 \
    critic.model.path=/models/qwen \
    critic.megatron.tensor_model_parallel_size=4 \
    critic.ppo_micro_batch_size_per_gpu=4 \
    critic.cliprange_value=0.5 \
    trainer.critic_warmup=10 \
    trainer.n_gpus_per_node=8 trainer.nnodes=2 trainer.total_training_steps=100
