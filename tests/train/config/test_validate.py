import json
from pathlib import Path

import pytest

from distca.errors import ConfigError
from distca.plan.cost.table_file import TABLES
from distca.train.config.cli import parse_run_config, to_yaml
from distca.train.config.validate import validate
from distca.train.config.validate_servers import servers_not_started

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize(
    ("name", "world_size"),
    [("tiny", 4), ("llama-8b", 8), ("llama-8b", 32), ("llama-8b-cut", 1), ("llama-34b", 16), ("llama-8b-2-gpus", 2)],
)
def test_shipped_configurations_are_accepted(name: str, world_size: int) -> None:
    validate(parse_run_config(["--config", str(CONFIGS / f"{name}.yaml")]), world_size)


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_defaults_are_accepted(ranks: int) -> None:
    validate(parse_run_config([]), ranks, vocabulary=256)


@pytest.mark.parametrize(
    ("arguments", "world_size", "said"),
    [
        ("--parallel.tp 2", 5, "The 5 ranks are not divisible by parallel.tp 2"),
        ("--parallel.tp 2", 1, "The run has 1 rank, but parallel.tp 2 needs at least 2"),
        ("--cad.servers 3 --parallel.tp 2", 4, "cad.servers is 3, which parallel.tp 2 does not divide"),
        ("--cad.servers 1 --train.offload all", 4, "train.offload is all, which servers without a model have not been"),
        ("--cad.servers 1 --cad.enabled false", 4, "cad.enabled is false, which servers without a model have not been"),
        ("--cad.server_gb_s 25", 4, "cad.server_gb_s is 25, and there are 0 servers without a model; give 0 or more"),
        ("--cad.speeds [1,0.5]", 4, "cad.speeds is [1.0, 0.5], but there are 4 attention servers; give one number"),
        (
            "--cad.servers 1 --cad.ranks_per_node 2",
            4,
            "does not divide the 5 attention servers (4 ranks, cad.servers 1",
        ),
        ("--parallel.pp 3", 12, "model.layers 4 is not divisible by parallel.pp 3"),
        ("--parallel.pp 4 --model.layers 6", 4, "model.layers 6 is not divisible by parallel.pp 4; change one."),
        ("--parallel.pp 4 --model.layers 3", 4, "model.layers 3 is less than parallel.pp 4, and every stage needs"),
        (
            "--cad.transport nccl --cad.nvshmem_buffer_gb 2.5",
            4,
            "cad.nvshmem_buffer_gb is 2.5, but cad.transport is nccl, which has no such buffer",
        ),
        (
            "--train.validate_every 5 --data.validation_fraction 0",
            4,
            "train.validate_every is 5, but data.validation_fraction is 0, which holds no document back",
        ),
        ("--parallel.pp 2 --cad.backward keep", 8, "cad.backward is keep, but with parallel.pp 2"),
        ("--parallel.pp 2 --train.offload all", 8, "train.offload is all, but parallel.pp is 2; set it to 1, or"),
        ("--cad.enabled false --train.offload all", 1, "train.offload is all, but cad.enabled is false; set it"),
        ("--train.offload all --train.recompute mlp", 4, "but train.recompute is mlp; set it to all, or"),
        ("--train.keep_outputs all --train.recompute mlp", 4, "but train.recompute is mlp; set it to none, or"),
        ("--train.offload all --cad.backward keep", 4, "but cad.backward is keep; set it to resend, or train.off"),
        ("--parallel.pp 2 --parallel.tp 2", 6, "The 6 ranks are not divisible by parallel.tp 2 × parallel.pp 2"),
        ("--parallel.tp 4", 16, "model.kv_heads 2 is not divisible by parallel.tp 4"),
        ("--model.ffn 385 --parallel.tp 2", 8, "model.ffn 385 is not divisible by parallel.tp 2"),
        (
            "--model.variant.query_key_norm width",
            4,
            "model.variant.query_key_norm is width, but model.qk_norm is false, so queries and keys have no norms; set "
            "model.qk_norm to true, or model.variant.query_key_norm to head.",
        ),
        ("--model.variant.norm_after_rotation true", 4, "model.variant.norm_after_rotation is true, but model.qk_norm"),
        (
            "--model.variant.query_key_norm width --model.variant.normalization LayerNorm --model.qk_norm true",
            4,
            "query_key_norm is width, but normalization is LayerNorm, and one norm of all heads needs RMSNorm; set",
        ),
        (
            "--model.variant.norm_after_rotation true --model.qk_norm true --model.variant.query_beta 0.1 "
            "--model.variant.query_length 8",
            4,
            "model.variant.query_beta is 0.1, but norms behind the rotation undo that growth of queries; set",
        ),
        (
            "--model.variant.parallel_mlp true --model.variant.norms both",
            4,
            "model.variant.norms is both, but parallel_mlp is true, and such an MLP reads the norm before attention; ",
        ),
        (
            "--model.variant.mlp_bias true --model.experts.count 4 --model.experts.ffn 32",
            4,
            "model.variant.mlp_bias is true, but it gives experts no biases; set it to false, or model.experts.count",
        ),
        ("--model.variant.rotary_percent 0.1", 4, "by which positions turn 3 of a head's 32 dimensions, but they turn"),
        (
            "--model.variant.rotary_percent 0.01",
            4,
            "by which positions turn 0 of a head's 32 dimensions, but they turn",
        ),
        (
            "--model.rope_scaling.kind yarn --model.rope_scaling.factor 4",
            4,
            "model.rope_scaling.original_length is 0, but kind yarn needs",
        ),
        (
            "--model.rope_scaling.kind linear --model.rope_scaling.factor 0.5",
            4,
            "model.rope_scaling.factor is 0.5; it must be a number of at least 1.",
        ),
        (
            "--model.rope_scaling.kind yarn --model.rope_scaling.factor 4 --model.rope_scaling.original_length 1024 "
            "--model.rope_scaling.attention_factor 0",
            4,
            "model.rope_scaling.attention_factor is 0; it must be a number above 0.",
        ),
        (
            "--model.hidden 8 --model.heads 4 --model.kv_heads 4 --model.rope_scaling.kind dynamic "
            "--model.rope_scaling.original_length 1024",
            4,
            "model.rope_scaling.kind is dynamic, but positions turn 2 elements of a head",
        ),
        (
            "--model.rope_scaling.factor 4",
            4,
            "model.rope_scaling.factor is 4, but kind is none, which has none; set kind, or leave factor out.",
        ),
        (
            "--model.rope_scaling.original_length 8192",
            4,
            "model.rope_scaling.original_length is 8192, but kind is none",
        ),
        ("--model.rope_scaling.truncate false", 4, "model.rope_scaling.truncate is false, but kind is none, which"),
        (
            "--model.rope_scaling.kind linear --model.rope_scaling.factor 1",
            4,
            "model.rope_scaling.factor is 1, with which kind linear stretches nothing; raise it, or set kind to none.",
        ),
        (
            "--model.rope_scaling.kind linear --model.rope_scaling.factor 2 --model.rope_scaling.attention_factor 1.5",
            4,
            "model.rope_scaling.attention_factor is 1.5, but kind is linear, which has none;",
        ),
        ("--model.hidden 129 --model.head_dim 32 --parallel.tp 2", 8, "model.hidden 129 is not divisible"),
        ("--model.vocabulary 200", 4, "model.vocabulary is 200, but the data uses 256 tokens"),
        ("--model.kv_heads 3", 4, "model.heads 4 is not divisible by model.kv_heads 3"),
        ("--model.hidden 130", 4, "model.hidden 130 is not divisible by model.heads 4"),
        ("--model.head_dim 33", 4, "The head dimension is 33"),
        (
            "--data.context_length 16385",
            4,
            "data.context_length is 16385, but a micro-batch holds 16384 tokens (4 data-",
        ),
        (
            "--data.context_length 4097",
            1,
            "a micro-batch holds 4096 tokens (1 data-parallel rank × data.tokens_per_rank",
        ),
        ("--data.context_length 4097 --data.whole_documents true", 4, "is 4097, but data.whole_documents keeps"),
        ("--data.context_length 4097 --cad.enabled false", 4, "data.context_length is 4097, but without cad.enabled"),
        ("--train.steps 0", 4, "train.steps is 0; it must be at least 1."),
        ("--optimizer.warmup_steps 60", 4, "optimizer.warmup_steps is 60, but train.steps is 60"),
        (
            "--optimizer.schedule wsd --optimizer.decay_steps 60",
            4,
            "decay_steps is 60, but train.steps 60 and a warm",
        ),
        (
            "--optimizer.decay_steps 6",
            4,
            "decay_steps is 6, but optimizer.schedule is cosine, which has",
        ),
        ("--optimizer.lr 0", 4, "optimizer.lr is 0.0; it must be above 0."),
        ("--optimizer.min_lr 1", 4, "optimizer.min_lr is 1.0, above optimizer.lr"),
        ("--optimizer.weight_decay -1", 4, "optimizer.weight_decay is -1.0; it must not be negative."),
        ("--optimizer.lr .inf", 4, "optimizer.lr is inf; it must be a finite number."),
        ("--optimizer.beta2 1", 4, "optimizer.beta2 is 1.0; it must be below 1."),
        ("--checkpoint.keep 0", 4, "checkpoint.keep is 0; it must be at least 1."),
        ("--cad.kernel flash4", 4, "cad.kernel flash4 computes in bf16, but train.precision is fp32"),
        ("--train.fp8 current", 4, "train.fp8 is current, but Transformer Engine's linear layers compute in bf16 here"),
        ("--train.gradients bfloat16", 4, "train.gradients is bfloat16, but train.precision is fp32, whose gradients"),
        ("--train.moments bfloat16", 4, "train.moments is bfloat16, but train.precision is fp32; set train.moments"),
        (
            "--train.precision bf16 --train.moments bfloat16 --optimizer.distributed false",
            4,
            "train.moments is bfloat16, but optimizer.distributed is false; set train.moments to float32",
        ),
        (
            "--train.precision bf16 --train.moments bfloat16 --optimizer.beta2 0.999",
            4,
            "train.moments is bfloat16, but optimizer.beta2 is 0.999, with which a second moment in it would stay",
        ),
        (
            "--train.precision bf16 --train.fp8_weights true",
            4,
            "train.fp8_weights is true, but train.fp8 is none; set train.fp8_weights to false, or train.fp8",
        ),
        (
            "--train.precision bf16 --train.fp8 current --train.fp8_weights true --optimizer.distributed false",
            4,
            "train.fp8_weights is true, but optimizer.distributed is false; set train.fp8_weights to false, or",
        ),
        ("--train.linears te", 4, "train.linears is te, but Transformer Engine's linear layers compute in bf16 here"),
        (
            "--train.precision bf16 --train.fp8 delayed --train.linears local",
            4,
            "train.fp8 is delayed, but Megatron-Core's own linear layers know no FP8",
        ),
        (
            "--train.precision bf16 --train.fp8 current --model.ffn 48 --parallel.tp 2",
            8,
            "train.fp8 is current, but a tensor-parallel rank's part of the MLP is 24, which is not a multiple of 16; "
            "change the model's sizes or parallel.tp, or set train.fp8 to none.",
        ),
        ("--log.timeline_steps [5,3]", 4, "log.timeline_steps is [5, 3]"),
        ("--log.profile_steps [0,3]", 4, "log.profile_steps is [0, 3]; it must be [first, last] with 1 <= first"),
        ("--data.source text", 4, "data.source text needs data.path."),
        (
            "--data.source indexed --data.path x --data.conversations true",
            4,
            "data.conversations is true, but data.source is indexed, whose documents are token ids already; leave",
        ),
        ("--data.source mix --data.path pretrain --data.end_token </s>", 4, "data.end_token is </s>, but data.source"),
        (
            "--data.field body",
            4,
            "data.field is body, but data.source is stdlib, whose documents are whole files; leave",
        ),
        ("--data.source mix --data.path /x", 4, "but data.path is /x, which is no mix (pretrain, prolong, pretrain-"),
        (
            "--data.source jsonl --data.path pretrain",
            4,
            "which is a mix; set DATA_PATH (data.path) to a file or folder",
        ),
        ("--data.source mix", 4, "needs data.path: one of pretrain, prolong, pretrain-long, prolong-long."),
        ("--name a/b", 4, "name is 'a/b'"),
        (f"--name {'n' * 201}", 4, "name has 201 bytes; it must have 200 at most."),
        ("--model.ffn 100000000000000", 4, "model.ffn is 100000000000000; it must be at most 2147483647."),
        ("--data.tokens_per_rank 9223372036854775807", 4, "data.tokens_per_rank is 9223372036854775807; it must be at"),
        ("--train.seed 99999999999999999999", 4, "train.seed is 99999999999999999999; it must be at most 922337203685"),
        ("--data.context_length 1", 4, "data.context_length is 1, and a document of one token has no next token"),
        ("--name ..", 4, "name is '..'; it must be a folder's name"),
        ("--cad.tolerance 7", 4, "cad.tolerance is 7.0; it must be below 1."),
        (
            "--cad.ranks_per_node 3",
            4,
            "cad.ranks_per_node is 3, which does not divide the 4 attention servers (4 ranks,",
        ),
        (
            "--cad.ranks_per_node 4 --parallel.tp 2",
            4,
            "does not divide the 2 attention servers (4 ranks, parallel.tp 2)",
        ),
        (
            "--train.evaluate true --checkpoint.resume auto --checkpoint.export hf",
            4,
            "train.evaluate is true, but checkpoint.export is hf, and only a run that trains writes it; leave one out.",
        ),
        ("--train.evaluate true", 4, "train.evaluate is true, but checkpoint.init_from and checkpoint.resume are both"),
        ("--cad.cost_table no.json", 4, "cad.cost_table is no.json, which is not a file or a folder of JSON"),
        ("--output /proc/x/y", 4, "output is /proc/x/y, but nothing can be written into /proc ("),
        (f"--output {__file__}/runs", 4, "/runs, but nothing can be written into"),
    ],
)
def test_each_problem_is_one_sentence(arguments: str, world_size: int, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(parse_run_config(arguments.split()), world_size, vocabulary=256)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value), "one mistake is one sentence"


def _table(folder: Path, **changes: object) -> str:
    content = json.loads((TABLES / "h200_flash4_32x8x128.json").read_text()) | changes
    path = folder / f"table{len(list(folder.iterdir()))}.json"
    path.write_text(json.dumps(content))
    return str(path)


def test_a_cost_table_is_read_before_anything_starts(tmp_path: Path) -> None:
    shape = ["--model.heads", "8", "--model.kv_heads", "2", "--model.head_dim", "128"]
    for more, table, said in (
        ([], str(CONFIGS / "tiny.yaml"), "tiny.yaml is not JSON ("),
        ([], _table(tmp_path), "was measured for 32 query heads, 8 key/value heads and head size 128, but a rank of"),
        (
            shape,
            _table(tmp_path, heads="many"),
            "has heads 'many', which must be a whole number of at least 1 and at most",
        ),
        (shape, _table(tmp_path, kv_rows="many"), "has something else where numbers should be ("),
        (shape, _table(tmp_path, q_rows=[]), "q_rows must be increasing numbers of at least 1, not []."),
    ):
        with pytest.raises(ConfigError) as caught:
            validate(parse_run_config(["--cad.cost_table", table, *more]), 4, vocabulary=256)
        assert str(caught.value).startswith(f"cad.cost_table is {table}, which cannot be used: The cost table")
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)
    validate(parse_run_config(["--cad.cost_table", _table(tmp_path), *shape]), 4, vocabulary=256)
    with pytest.raises(ConfigError, match=r"which cannot be used: The cost table .* has heads 'many'"):
        validate(parse_run_config(["--cad.cost_table", str(tmp_path), *shape]), 4, vocabulary=256)
    (tmp_path / "tables").mkdir()
    _table(tmp_path / "tables")
    validate(parse_run_config(["--cad.cost_table", str(tmp_path / "tables"), *shape]), 4, vocabulary=256)


@pytest.mark.parametrize(
    "arguments",
    [
        "--cad.kernel reference --train.precision bf16",
        "--cad.enabled false --data.context_length 1024",
        "--cad.enabled false --data.context_length 1024 --train.recompute all",
        "--train.offload all",
        "--cad.nvshmem_buffer_gb 2.5",
        "--cad.enabled false --cad.transport nccl --cad.nvshmem_buffer_gb 2.5 --data.context_length 1024",
        "--train.evaluate true --train.validate_every 5 --data.validation_fraction 0 --checkpoint.resume latest",
        "--train.evaluate true --checkpoint.resume latest --train.precision bf16 --train.moments bfloat16 "
        "--optimizer.beta2 0.999",
        "--data.whole_documents true --data.context_length 1024",
        "--train.steps 1 --optimizer.warmup_steps 0",
        "--optimizer.schedule constant --optimizer.lr 1e-5",
        "--train.steps 1",
        "--log.timeline_steps [5,61]",
        "--model.head_dim 64",
        "--log.timeline_steps [60,60]",
        "--model.rope_scaling.kind dynamic --model.rope_scaling.original_length 1024",
        "--model.rope_scaling.kind linear --model.rope_scaling.factor 2 --model.rope_scaling.beta_fast 32",
    ],
)
def test_unusual_settings_that_work_are_accepted(arguments: str) -> None:
    validate(parse_run_config(arguments.split()), 4, vocabulary=256)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 1.0, "attention_factor": 1.5},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "low_freq_factor": 2.0},
    ],
)
@pytest.mark.parametrize("more", ["", "--model.rope_scaling.kind none", "--checkpoint.resume auto"])
def test_what_a_folder_says_of_positions_is_accepted(tmp_path: Path, scaling: object, more: str) -> None:
    folder, written = tmp_path / "folder", tmp_path / "config.yaml"
    folder.mkdir()
    described = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 256) | {"model_type": "llama"}
    described |= {"num_hidden_layers": 2, "num_attention_heads": 4, "rms_norm_eps": 1e-5, "rope_scaling": scaling}
    (folder / "config.json").write_text(json.dumps(described))
    config = parse_run_config(["--checkpoint.init_from", str(folder), "--output", str(tmp_path), *more.split()])
    validate(config, 4, vocabulary=256)
    written.write_text(to_yaml(config))
    validate(parse_run_config(["--config", str(written)]), 4, vocabulary=256)
    if "resume" in more:
        (folder / "config.json").unlink()
        folder.rmdir()
        validate(parse_run_config(["--config", str(written)]), 4, vocabulary=256)


@pytest.mark.parametrize(
    "setting, value, instead",
    [
        ("train.fp8", "delayed", "none"),
        ("train.linears", "te", "auto"),
        ("train.moments", "bfloat16", "float32"),
        ("cad.kernel", "flash4", "auto"),
        ("cad.transport", "nccl", "auto"),
    ],
)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_cpu_ranks_are_refused_what_needs_gpus(setting: str, value: str, instead: str, precision: str) -> None:
    config = parse_run_config([f"--{setting}", value, "--train.precision", precision])
    with pytest.raises(ConfigError) as caught:
        validate(config, 4, on_cpus=True)
    said = (
        f"{setting} is {value}, which needs GPUs, but the ranks run on CPUs; set {setting} to {instead}, or start them"
    )
    assert str(caught.value) == f"{said} on GPUs."
    if precision == "bf16":
        validate(config, 4)


def test_what_else_is_wrong_on_cpus_is_said_too() -> None:
    words = "--train.precision bf16 --train.fp8 current --train.fp8_weights true --model.heads 5"
    with pytest.raises(ConfigError) as caught:
        validate(parse_run_config(words.split()), 4, on_cpus=True)
    assert [line.split()[1] for line in str(caught.value).splitlines()[1:4]] == [
        "train.fp8",
        "train.fp8_weights",
        "model.hidden",
    ]


def test_without_disaggregation_one_rank_may_hold_all() -> None:
    validate(parse_run_config(["--cad.enabled", "false"]), 1)


def test_all_problems_are_reported_together() -> None:
    arguments = "--model.heads 5 --parallel.tp 3 --optimizer.warmup_steps 99"
    with pytest.raises(ConfigError) as caught:
        validate(parse_run_config(arguments.split()), 4)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{len(lines) - 1} settings cannot work:"
    for part in (
        "model.hidden 128 is not divisible by model.heads 5",
        "model.heads 5 is not divisible by parallel.tp 3",
        "The 4 ranks",
        "optimizer.warmup_steps is 99",
    ):
        assert any(part in line for line in lines[1:])


@pytest.mark.parametrize("name", ["tiny", "llama-8b", "llama-8b-cut", "llama-34b"])
@pytest.mark.parametrize("steps", [1, 2, 5, 10, 10_000])
def test_shipped_configurations_run_for_any_number_of_steps(name: str, steps: int) -> None:
    line = ["--config", str(CONFIGS / f"{name}.yaml"), "--train.steps", str(steps)]
    config = parse_run_config(line)
    validate(config, 16)
    assert config.resolved_warmup_steps == min(steps // 6, 100)
    assert parse_run_config([*line, "--optimizer.warmup_steps", "3"]).resolved_warmup_steps == 3


def test_servers_that_a_launcher_starts_otherwise_than_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVERS", "4")
    for sharing, tp, said in (("2", 2, []), ("3", 2, ["SERVERS_PER_GPU is 3, but parallel.tp (TP_SIZE) is 2"])):
        monkeypatch.setenv("SERVERS_PER_GPU", sharing)
        found = servers_not_started(parse_run_config(["--cad.servers", "4", "--parallel.tp", str(tp)]))
        assert [each[: len(begin)] for each, begin in zip(found, said, strict=True)] == said
    monkeypatch.delenv("SERVERS_PER_GPU")
    (only,) = servers_not_started(parse_run_config(["--cad.servers", "3"]))
    assert only.startswith("cad.servers is 3, but pretrain_llama.sh starts servers by SERVERS, which is 4; set SERVERS")
