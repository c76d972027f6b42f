# PPO with a reward model in OpenRLHF, whose engines have devices of their own.
ray job submit -- python3 -m openrlhf.cli.train_ppo_ray \
   --ref_num_nodes 1 --ref_num_gpus_per_node 8 \
   --reward_num_nodes 1 --reward_num_gpus_per_node 8 \
   --critic_num_nodes 1 --critic_num_gpus_per_node 8 \
   --actor_num_nodes 1 --actor_num_gpus_per_node 8 \
   --vllm_num_engines 4 --vllm_tensor_parallel_size 2 \
   --pretrain /models/sft --reward_pretrain /models/reward \
   --save_path /checkpoint/ppo \
   --micro_train_batch_size 8 --train_batch_size 128 \
   --micro_rollout_batch_size 16 --rollout_batch_size 1024 \
   --max_samples 100000 --max_epochs 1 \
   --prompt_max_len 1024 --generate_max_len 1024 \
   --zero_stage 3 --bf16 \
   --actor_learning_rate 5e-7 --critic_learning_rate 9e-6 \
   --init_kl_coef 0.01 \
   --prompt_data /data/a.jsonl,/data/b.jsonl --prompt_data_probs 0.4,0.6 \
   --input_key context_messages --apply_chat_template \
   --normalize_reward --adam_offload --flash_attn --gradient_checkpointing \
   --async_train
