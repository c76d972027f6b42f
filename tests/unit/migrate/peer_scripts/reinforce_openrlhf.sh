# REINFORCE++ in OpenRLHF, with one sample per prompt and rewards of a model.
ray job submit -- python3 -m openrlhf.cli.train_ppo_ray \
   --pretrain /models/llama-3-8b-sft \
   --reward_pretrain /models/reward \
   --advantage_estimator reinforce --gamma 0.99 \
   --init_kl_coef 1e-4 --kl_estimator k1 \
   --prompt_data /data/prompts.jsonl --input_key context_messages \
   --rollout_batch_size 1024 --n_samples_per_prompt 1 --train_batch_size 128 \
   --micro_train_batch_size 8 --prompt_max_len 1024 --generate_max_len 1024 \
   --actor_num_nodes 1 --actor_num_gpus_per_node 8 --colocate_all_models --vllm_num_engines 8 \
   --actor_learning_rate 5e-7 --save_steps -1
