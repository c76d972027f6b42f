# CPO in its fork of verl.
N=8
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=cpo \
    algorithm.wrap_method=negonly_mi3_qwen3 \
    algorithm.cpo_lambda=5.0 \
    algorithm.neg_alpha=0.1 \
    algorithm.gold_as_hint=True \
    actor_rollout_ref.actor.vocab_size=151936 \
    data.train_files=/data/numina.parquet data.val_files=/data/aime.parquet \
    data.train_batch_size=1024 data.max_prompt_length=2048 data.max_response_length=2048 \
    actor_rollout_ref.model.path=/models/Qwen3-4B \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.rollout.n=${N} \
    trainer.total_epochs=2
