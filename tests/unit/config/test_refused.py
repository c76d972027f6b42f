"""What commands refuse before they begin, by the start of the message, and what lies just beside it and is accepted."""

import pytest

from megarl.config import Config
from megarl.config.check import TRAINING_CHECKS, check_eval
from megarl.config.load import with_overrides
from megarl.errors import ConfigError

CHECKS = {**TRAINING_CHECKS, "eval": check_eval}
BASE = ["model.path=models/tiny", "data.train=[a.parquet]", "sft.train=[a.jsonl]"]
SHORT = "data.max_prompt_tokens=100 rollout.max_response_tokens=28"
BEST = "checkpoint.keep_best=1 checkpoint.every_steps=20"
HINT = "algo.distill.teacher=hint algo.distill.mode=exact"
MODEL = "algo.distill.teacher=model"
EXACT = f"{MODEL} algo.distill.mode=exact"
RATE = "algo.distill.teacher_update_rate=0.05"
SERVED = "teacher.model_path=t teacher.servers=[http://host/v1]"
WRITTEN = "algo.demonstrations.strategy=fixed algo.demonstrations.source=teacher algo.demonstrations.max_ratio=1.0"
WRITING = "teacher.model_path=t teacher.writers=[http://host/v1] teacher.served_name=big"
TWO_TEACHERS = "teachers.a.model_path=t teachers.b.model_path=u"
SPLIT = "placement.mode=split"
TIS = "algo.correction.name=tis_upper"
THREE_STAGES = '{"num_engines":3,"tp":2,"pp":3}'
CONTINUE = "rollout.schedule.staleness=1 rollout.schedule.on_update=continue"
PAIRS = "train_reward.train=[a.jsonl]"
PREFERENCES = "train_preference.train=[a.jsonl]"
VLLM = "rollout.engine.vllm"

# Command → settings, and how the message about them begins.
REFUSED = {
    "train": [
        ("model.path=''", "model.path: is empty; set it to a directory with config.json"),
        ("data.train=[]", "data.train: is empty; list parquet or JSONL files"),
        ("rewards.manager=remote", "rewards.remote.urls: is empty"),
        (f"{VLLM}.zzz=1", f"{VLLM}.zzz: is not an engine argument of the installed vLLM"),
        ('data.train=[a,{"path":b,"weight":0}]', "data.train[1].weight: got 0.0, expected > 0; leave the file out"),
        ("rollout.temperature=0.0", "rollout.temperature: got 0.0, expected > 0"),
        ("actor.layout.sequence_parallel=true", "actor.layout.sequence_parallel: got true with tp=1"),
        ("critic.layout.sequence_parallel=true", "critic.layout.sequence_parallel: got true with tp=1"),
        ("reference.layout.virtual_pp=2", "reference.layout.virtual_pp: got 2 with pp=1"),
        ("critic.layout.cp=0", "critic.layout.cp: got 0, expected >= 1"),
        (f"{SHORT} actor.micro_batch_tokens=127", "actor.micro_batch_tokens: got 127, expected >= 128"),
        (f"{SHORT} reference.micro_batch_tokens=127", "reference.micro_batch_tokens: got 127, expected >= 128"),
        (f"{SHORT} critic.micro_batch_tokens=127", "critic.micro_batch_tokens: got 127, expected >= 128"),
        (f"{SHORT} rollout.engine.max_model_tokens=127", "rollout.engine.max_model_tokens: got 127, expected >= 128"),
        (BEST, "checkpoint.keep_best: got 1, but data.val is empty, so no checkpoint has a score"),
        (
            f"{BEST} data.val=[v] checkpoint.every_steps=15",
            "checkpoint.every_steps: got 15, expected a multiple of validation.every_steps=10",
        ),
        (
            f"{BEST} data.val=[v] checkpoint.best_metric=val/test_score_greedy validation.greedy=false",
            "checkpoint.best_metric: got val/test_score_greedy, but validation.greedy=false",
        ),
        ("validation.stop_after_zeros=2", "validation.stop_after_zeros: is set, but data.val is empty"),
        (
            "validation.stop_after_zeros=2 data.val=[v] checkpoint.best_metric=val/test_score_greedy "
            "validation.greedy=false",
            "checkpoint.best_metric: got val/test_score_greedy, but validation.greedy=false",
        ),
        ("rollout.top_p=0.95", "rollout.top_p: got 0.95, but rollout.top_k=-1 does not limit the number of tokens"),
        ("rollout.top_k=1", "rollout.top_k: got 1, which leaves nothing to choose"),
        ("rollout.top_k=9 algo.cpo.method=verifier_sign", "rollout.top_k: got 9, but algo.cpo.method=verifier_sign"),
        (
            "algo.cpo.method=verifier_sign algo.cpo.shuffled_baseline=true trainer.prompts_per_step=1",
            "algo.cpo.shuffled_baseline: got true with trainer.prompts_per_step=1",
        ),
        ("trainer.prompts_per_step=8 trainer.mini_batch_prompts=3", "trainer.mini_batch_prompts: got 3, which does"),
        ("rollout.source=replay", "rollout.replay_dir: is not set, but rollout.source=replay"),
        ("logging.profile_steps=[0,3]", "logging.profile_steps: got [0, 3], expected first and last step with 1 <="),
        ("logging.profile_steps=[4,3]", "logging.profile_steps: got [4, 3], expected first and last step"),
        ("logging.profile_steps=[3,101]", "logging.profile_steps: got [3, 101], expected first and last step"),
        ("trainer.total_steps=0", "trainer.total_steps: got 0, which only validates, but data.val is empty"),
        ("validation.pass_at=[1,4] validation.num_samples=2", "validation.pass_at: got [1, 4], expected at most"),
        # Roles beside the actor.
        (
            "reference.layout.pp=3",
            "reference.layout: tp 1 × pp 3 × cp 1 × dp 1 = 3 ranks, expected <= 1, those of actor",
        ),
        ("critic.layout.cp=2", "critic.layout: tp 1 × pp 1 × cp 2 × dp 1 = 2 ranks, expected <= 1"),
        ("reward_model.layout.pp=5", "reward_model.layout: tp 1 × pp 5 × cp 1 × dp 1 = 5 ranks, expected <= 1"),
        *(
            (
                f"algo.kl.where=loss algo.kl.reset_every_steps=5 actor.layout.dp=2 {key}={value}",
                f"algo.kl.reset_every_steps: got 5 with {key}, but only a whole model on the actor's ranks",
            )
            for key, value in {
                "reference.model_path": "other",
                "reference.layout": '{"tp":2}',
                "actor.lora": '{"rank":4}',
            }.items()
        ),
        ("trainer.total_steps=20 critic.warmup_steps=21", "critic.warmup_steps: got 21, expected <="),
        (
            "actor.layout.dp=4 critic.lora.rank=8 critic.layout.dp=2 critic.layout.etp=2",
            "critic.lora.targets: got experts with layout.etp=2",
        ),
        ("critic.lora.rank=8 critic.freeze=true", "critic.lora.path: is not set, but these adapters are not trained"),
        (
            "rewards.manager=model reward_model.lora.rank=8",
            "reward_model.lora.path: is not set, but these adapters are not trained",
        ),
        ("rewards.manager=model", "reward_model.model_path: is not set, but rewards.manager=model asks a reward model"),
        # Teachers.
        ("teacher.model_path=t", "teacher: is set, but algo.distill.teacher=none asks no teacher"),
        (MODEL, "teacher.model_path: is not set, but algo.distill.teacher=model; set it to the"),
        (
            f"{EXACT} teacher.model_path=t teacher.layout.tp=2 actor.layout.dp=2",
            "teacher.layout: got LayoutConfig(tp=2",
        ),
        (f"{EXACT} {SERVED}", "algo.distill.mode: got exact with teacher.servers, which send log-probs of few tokens"),
        (f"{EXACT} {TWO_TEACHERS}", "algo.distill.mode: got exact with the teachers teachers.a, teachers.b, expected"),
        (f"{MODEL} {SERVED} rollout.temperature=0.7", "rollout.temperature: got 0.7 with teacher.servers"),
        (f"{EXACT} teacher.model_path=t rollout.top_k=50", "rollout.top_k and rollout.top_p: got 50 and 1.0, but the"),
        (f"{MODEL} {TWO_TEACHERS} teachers.b.sources=[a]", "teachers.b.sources: a has the teacher teachers.a already"),
        (f"{HINT} teachers.a.model_path=t", "teachers: got a with algo.distill.teacher=hint, where the policy teaches"),
        (f"{HINT} algo.cpo.method=mi", "algo.cpo.method: got mi with algo.distill.teacher=hint, which both learn from"),
        ("algo.distill.teacher=hint rollout.top_k=50", "rollout.top_k and rollout.top_p: got 50 and 1.0 with"),
        (
            "algo.distill.teacher=hint algo.distill.shuffled_baseline=true trainer.prompts_per_step=1",
            "algo.distill.shuffled_baseline: got true with trainer.prompts_per_step=1",
        ),
        (f"{HINT} teacher.layout.tp=2 actor.layout.dp=2", "teacher.model_path: is not set, but"),
        (
            f"{HINT} actor.layout.pp=2 actor.layout.virtual_pp=2 actor.layout.overlap_p2p=true",
            "actor.layout.virtual_pp: got 2 with algo.distill.mode=exact, expected 1",
        ),
        (
            f"{HINT} {RATE} teacher.model_path=t",
            "algo.distill.teacher_update_rate: got 0.05 with teacher.model_path=t,",
        ),
        (f"{HINT} {RATE} teacher.layout.dp=2 actor.layout.tp=2", "teacher.layout: got LayoutConfig(tp=1"),
        (
            f"algo.distill.teacher=hint {RATE} teacher.servers=[http://h]",
            "algo.distill.teacher_update_rate: got 0.05 with teacher.servers, whose weights stay",
        ),
        (f"{MODEL} {RATE} teachers.a={{}}", "algo.distill.teacher_update_rate: got 0.05 with teachers a, but only"),
        ("algo.distill.teacher_update_rate=1.5", "algo.distill.teacher_update_rate: got 1.5, expected in [0, 1]"),
        (f"{MODEL} {SERVED} teacher.micro_batch_tokens=9", "teacher.micro_batch_tokens: is set, but teacher.servers"),
        (
            f"{MODEL} teachers.a.model_path=t teachers.a.layout.tp=2",
            "teachers.a.layout: tp 2 × pp 1 × cp 1 × dp 1 = 2 ranks, expected <= 1",
        ),
        (WRITTEN, "algo.demonstrations.source: got teacher with algo.distill.teacher=none, which has no model"),
        (f"{EXACT} {WRITTEN} teacher.model_path=t", "algo.demonstrations.source: got teacher, but neither"),
        (f"{EXACT} {WRITTEN} {WRITING} rollout.stop=[x]", "algo.demonstrations.source: got teacher with rollout.stop="),
        (f"{MODEL} {WRITTEN} {WRITING}", "algo.demonstrations.source: got teacher with algo.distill.mode=sampled"),
        (f"{EXACT} {WRITING}", "teacher.writers: is set, but algo.demonstrations.source=data asks no teacher"),
        # Where trainer and engines lie.
        (
            "actor.layout.dp=8 placement.trainer.num_nodes=3",
            "placement.trainer.num_nodes: got 3, expected a divisor of",
        ),
        (
            "actor.layout.dp=8 placement.trainer.num_nodes=2 placement.trainer.devices_per_node=8",
            "placement.trainer: num_nodes=2 × devices_per_node=8 is not the 8 ranks of actor.layout",
        ),
        (
            "placement.engines.num_nodes=2",
            "placement.engines: is set, but with placement.mode=colocated engines run on",
        ),
        (
            "actor.layout.dp=2 rollout.engine.num_engines=2 rollout.engine.tp=2",
            "rollout.engine.num_engines=2 × rollout.engine.tp=2 = 4 devices, but placement.mode=colocated shares",
        ),
        (
            "actor.layout.dp=12 rollout.engine.num_engines=2 rollout.engine.tp=4 placement.trainer.num_nodes=2",
            "rollout.engine: an engine has tp=4 × pp=1 = 4 workers, expected a divisor or a multiple of the 6 devices",
        ),
        (
            f"{SPLIT} rollout.engine.num_engines=3 placement.engines.num_nodes=2",
            "placement.engines.num_nodes: got 2, expected a divisor of 3, the 3 devices of",
        ),
        (
            f"{SPLIT} rollout.engine.num_engines=3 rollout.engine.tp=2 placement.engines.num_nodes=2",
            "rollout.engine: an engine has tp=2 × pp=1 = 2 workers, expected a divisor or a multiple of the 3 devices",
        ),
        (
            f"{SPLIT} rollout.engine={THREE_STAGES} placement.engines.num_nodes=4",
            "placement.engines.num_nodes: got 4, expected a divisor of 18, the 18 devices of",
        ),
        (f"{SPLIT} placement.offload=true", "placement.offload: got true with placement.mode=split"),
        ("placement.suspend_nccl=true", "placement.suspend_nccl: got true with placement.offload=false, where nobody"),
        ("placement.offload=true placement.suspend_nccl=true", "placement.suspend_nccl: got true, but on cpu"),
        ("sync.dtype=bfloat16", "sync.dtype: got bfloat16, which model.dtype already is"),
        (f"{SPLIT} sync.delta=true sync.host_group=device", "sync.delta: got true with sync.host_group=device"),
        (f"{SPLIT} sync.cuda_ipc=true", "sync.cuda_ipc: got true with placement.mode=split"),
        ("sync.cuda_ipc=true", "sync.cuda_ipc: got true, but processes cannot share a device's memory on cpu"),
        # Samples of older weights.
        (f"{SPLIT} {TIS} rollout.schedule.window_frac=0.5", "rollout.schedule.window_frac: got 0.5 with"),
        (
            f"{TIS} rollout.schedule.staleness=1",
            "rollout.schedule.staleness: got 1 with placement.mode=colocated and rollout.schedule.on_update=finish",
        ),
        (
            f"{TIS} {CONTINUE} rollout.stop=[</a>]",
            "rollout.schedule.staleness: got 1 with placement.mode=colocated and rollout.stop=['</a>']",
        ),
        (CONTINUE, "rollout.schedule.staleness: got 1 with algo.correction.name=none"),
        # Samples of a record are as stale as they were when they were sampled.
        (
            "rollout.schedule.staleness=1 rollout.source=replay rollout.replay_dir=records",
            "rollout.schedule.staleness: got 1 with algo.correction.name=none",
        ),
        (f"{SPLIT} {TIS} rollout.schedule.staleness=2", "rollout.schedule.staleness: got 2 with"),
        (f"{SPLIT} {TIS} {CONTINUE} rollout.engine.pp=2", "rollout.engine.pp: got 2 with"),
        (f"{SPLIT} {TIS} {CONTINUE} run.deterministic=true", "run.deterministic: got true with"),
        # Engines that draft or round.
        ("rollout.engine.speculation.min_ngram_tokens=5", "rollout.engine.speculation.min_ngram_tokens: got 5"),
        (
            f"{SPLIT} rollout.engine.pp=2 rollout.engine.speculation.method=mtp",
            "rollout.engine.speculation.method: got mtp with rollout.engine.pp=2",
        ),
        (
            "rollout.engine.quantization=fp8_per_channel",
            "rollout.engine.quantization: got fp8_per_channel with algo.correction.name=none",
        ),
        (
            "rollout.engine.kv_cache_dtype=fp8_e4m3",
            "rollout.engine.kv_cache_dtype: got fp8_e4m3 with algo.correction.name=none",
        ),
        (
            f"{TIS} rollout.engine.quantization=fp8_per_block sync.dtype=float8_e4m3",
            "sync.dtype: got float8_e4m3 with rollout.engine.quantization=fp8_per_block, so that weights",
        ),
    ],
    "sft": [
        ("model.path=''", "model.path: is empty"),
        ("sft.train=[]", "sft.train: is empty; list parquet or JSONL files, as in sft.train=[a.parquet]"),
        (f"{SHORT} actor.micro_batch_tokens=127", "actor.micro_batch_tokens: got 127, expected >= 128"),
        ("actor.micro_batch_tokens=63 sft.max_tokens=64", "actor.micro_batch_tokens: got 63, expected >= 64 (sft.max_"),
        ("actor.layout.dp=8 placement.trainer.num_nodes=3", "placement.trainer.num_nodes: got 3"),
        ("cluster.collective_timeout_s=30", "cluster.collective_timeout_s: got 30, expected more than"),
        (BEST, "checkpoint.keep_best: got 1, but sft.val is empty, so no checkpoint has a score"),
        (
            f"{BEST} sft.val=[v] sft.val_every_steps=15",
            "checkpoint.every_steps: got 20, expected a multiple of sft.val_every_steps=15",
        ),
        (f"{EXACT} {RATE}", "algo.distill.teacher_update_rate: got 0.05, but sft learns from the teacher alone"),
    ],
    "train-reward": [
        ("", "train_reward.train: is empty; list parquet or JSONL files"),
        (f"{PAIRS} {SHORT} actor.micro_batch_tokens=257", "actor.micro_batch_tokens: got 257, expected >= 258, two"),
        (f"{PAIRS} reward_model.model_path=judge", "reward_model: is for runs that are judged by a reward model"),
        (f"{PAIRS} {BEST}", "checkpoint.keep_best: got 1, but train_reward.val is empty"),
    ],
    "train-preference": [
        ("", "train_preference.train: is empty; list parquet or JSONL files"),
        (
            f"{PREFERENCES} train_preference.objective=kto train_preference.batch_size=1",
            "train_preference.batch_size: got 1, where no other pair lends the response that kto's KL",
        ),
        (f"{PREFERENCES} {SHORT} actor.micro_batch_tokens=255", "actor.micro_batch_tokens: got 255, expected >= 256,"),
        (f"{PREFERENCES} reference.layout.dp=16", "reference.layout: tp 1 × pp 1 × cp 1 × dp 16 = 16 ranks, expected"),
        (f"{PREFERENCES} {BEST}", "checkpoint.keep_best: got 1, but train_preference.val is empty"),
    ],
    # Names become files, lines of scripts and addresses of hosts.
    "eval": [
        (r'run.name="a\nb"', r"run.name: got 'a\nb', expected a single directory name of letters, digits, spaces"),
        (r'run.name="a\u202eb"', r"run.name: got 'a\u202eb', expected a single directory name"),
        (r'run.dir="runs\x1b[2J"', r"run.dir: got 'runs\x1b[2J', expected a path without control characters"),
        (r'cluster.address="h:1\n"', r"cluster.address: got 'h:1\n', expected HOST:PORT of a running Ray cluster"),
        ("cluster.address=-h:1", "cluster.address: got '-h:1', expected HOST:PORT"),
        ("cluster.hosts=[a,'b]']", "cluster.hosts: got 'b]', expected names of hosts, of letters, digits"),
        # Arguments of vLLM, which training refuses alike.
        (
            f"{VLLM}.max_num_batch_tokens=512",
            f"{VLLM}.max_num_batch_tokens: is not an engine argument of the installed",
        ),
        (f"{VLLM}.zzz=1", f"{VLLM}.zzz: is not an engine argument of the installed vLLM; see vLLM's EngineArgs"),
        (f"{VLLM}.tensor_parallel_size=2", f"{VLLM}.tensor_parallel_size: cannot be set here: set rollout.engine.tp"),
        (
            f"{VLLM}.max_num_batched_tokens=many",
            f"{VLLM}.max_num_batched_tokens: got 'many' (str), expected int | None",
        ),
        (f"{VLLM}.async_scheduling=1", f"{VLLM}.async_scheduling: got 1 (int), expected bool | None"),
        (f"{VLLM}.max_num_batched_tokens=true", f"{VLLM}.max_num_batched_tokens: got True (bool), expected int | None"),
        (f"{VLLM}.load_format=dummy", f"{VLLM}.load_format: got 'dummy', expected auto or safetensors"),
    ],
}
ACCEPTED = {
    "train": [
        "",
        "sft.train=[]",
        'data.train=[{"path":a,"weight":0.5},b]',
        "actor.layout.sequence_parallel=true actor.layout.tp=2",
        f"{SHORT} actor.micro_batch_tokens=128 rollout.engine.max_model_tokens=128",
        f"{BEST} data.val=[v]",
        "rollout.top_k=2",
        "rollout.top_p=0.95 rollout.top_k=50",
        "trainer.prompts_per_step=8 trainer.mini_batch_prompts=4",
        "actor.layout.dp=4 trainer.prompts_per_step=3 rollout.num_samples=2",
        "rollout.source=replay rollout.replay_dir=runs/a/records",
        "logging.profile_steps=[1,100]",
        "trainer.total_steps=0 actor.optimizer.warmup_steps=5 data.val=[v]",
        "actor.layout.dp=4 trainer.prompts_per_step=4 rollout.num_samples=3 reference.layout.dp=4",
        f"actor.layout.pp=2 reference.layout.pp=2 reference.model_path=other {SHORT} reference.micro_batch_tokens=128",
        "trainer.total_steps=20 critic.warmup_steps=20 critic.optimizer.warmup_steps=39",
        "critic.freeze=true critic.value_clip=null",
        "actor.layout.dp=4 rewards.manager=model reward_model.model_path=judge reward_model.layout.dp=4",
        f"{EXACT} {WRITTEN} {WRITING}",
        'actor.layout.dp=8 placement.trainer={"num_nodes":2,"devices_per_node":4} rollout.engine.tp=4',
        "actor.layout.dp=4 rollout.engine.tp=2 placement.offload=true",
        "actor.layout.dp=8 rollout.engine.num_engines=2 rollout.engine.tp=4 placement.trainer.num_nodes=4",
        f"{SPLIT} rollout.engine.num_engines=2 rollout.engine.tp=4 rollout.engine.pp=2 placement.engines.num_nodes=4",
        f"{SPLIT} {TIS} rollout.schedule.staleness=1",
        f"{SPLIT} {TIS} rollout.schedule.staleness=4 rollout.schedule.on_update=continue",
        # Engines that share devices interrupt samples.
        f"{TIS} {CONTINUE} placement.offload=true",
        # Who wants to know what staleness costs without a correction has to say so.
        f"{SPLIT} {CONTINUE} algo.correction.forced=true",
    ],
    "sft": [
        "data.train=[]",
        "actor.micro_batch_tokens=64 sft.max_tokens=64",
        "sft.batch_size=6 actor.layout.dp=4",
        "rollout.top_p=0.9 rollout.num_samples=1 rollout.engine.num_engines=5",
        "critic.layout.dp=16 critic.warmup_steps=1000",
        "cluster.collective_timeout_s=30 cluster.node_timeout_s=29",
        f"{BEST} sft.val=[v] sft.val_every_steps=10",
    ],
    "train-reward": [f"{PAIRS} {SHORT} actor.micro_batch_tokens=258"],
    "train-preference": [
        f"{PREFERENCES} {SHORT} actor.micro_batch_tokens=256",
        f"{PREFERENCES} train_preference.total_epochs=1 actor.optimizer.warmup_steps=600",
    ],
    "eval": [
        "run.name=größe数学(2) run.dir=runs/50%/it's cluster.address=10.0.0.1:20000 cluster.hosts=[node-1,gpu_2.c]",
        "rollout.engine.quantization=fp8_per_channel rollout.engine.kv_cache_dtype=fp8_e4m3",
    ],
}


def config(settings: str) -> Config:
    return with_overrides(Config(), [*BASE, *settings.split(" ")] if settings else BASE)


@pytest.mark.parametrize(
    ("command", "settings", "message"), [(command, *case) for command, cases in REFUSED.items() for case in cases]
)
def test_what_is_refused(command: str, settings: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CHECKS[command](config(settings))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("command", "settings"), [(command, settings) for command, cases in ACCEPTED.items() for settings in cases]
)
def test_what_is_accepted(command: str, settings: str) -> None:
    CHECKS[command](config(settings))
