# GRPO in OpenRLHF with the names since 0.11.
python3 -m openrlhf.cli.train_ppo_ray \
   --actor.model_name_or_path /models/qwen \
   --algo.advantage.estimator group_norm \
   --algo.kl.use_loss --algo.kl.estimator k3 --algo.kl.init_coef 1e-3 \
   --actor.eps_clip_low_high 0.2 0.27 \
   --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --train.batch_size 256 \
   --rollout.max_new_tokens 4096 --train.micro_batch_size 2 \
   --data.prompt_dataset /data/train.jsonl --data.input_key prompt --data.label_key label \
   --actor.num_gpus_per_node 8 --train.colocate_all --vllm.num_engines 8 --ckpt.save_steps -1
