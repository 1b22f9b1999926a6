"""The model card of a trained model, in the form that the hub reads."""

from __future__ import annotations

import json

TASKS = {
    "sft": ("supervised fine-tuning", ["sft"]),
    "dpo": ("direct preference optimization", ["dpo"]),
    "reward": ("reward modelling", ["reward-model"]),
}


def told_rows(data: dict) -> str:
    """How many rows a model was trained on, in words; of a stream that may not be known."""
    return "rows of unknown number" if data["rows"] is None else f"{data['rows']:,} rows"


def card(facts: dict, adapter: bool) -> str:
    """The text of README.md: the hub's metadata, what the model is, and how to load it.

    Args:
        facts: of `metadata.facts_of`.
        adapter: whether it is a LoRA adapter, or a whole model.
    """
    base, data, labels = facts["base_model"], facts["data"], facts["labels"]
    told, _ = TASKS[facts["task"]]
    kind = "LoRA adapter" if adapter else "model"
    names = ", ".join(f"`{name}`" for name in data["names"])
    shown_already = ("data_version", "license")
    own = "".join(f"- {_inline(k)}: {_inline(v)}\n" for k, v in facts["metadata"].items() if k not in shown_already)
    loss = f"all tokens of both answers; ignored: {', '.join(labels['ignored'])}"
    if facts["task"] == "sft":
        loss = f"{labels['loss_on'].replace('-', ' ')}; ignored: {', '.join(labels['ignored'])}"
    if facts["task"] == "reward":
        loss = "the score at the last token of each conversation"
    start = f", going on from the adapter `{facts['adapter']}`" if "adapter" in facts else ""
    sizes = told_rows(data) + (f", {data['eval_rows']:,} held out" if data["eval_rows"] else "")
    template = facts["chat_template"]
    warned = ", and in `adapter_config.json` under `custom_metadata`, a key that PEFT warns of and passes over"
    warned = warned if adapter else ""
    return f"""---
{_front_matter(facts, adapter)}---

# {base["name"]}, {told}

A {kind} made by {told} from `{base["name"]}`{_revision(base)}{start} with [TRL](https://huggingface.co/docs/trl).

- Data: {names} ({sizes}; fingerprint `{data["fingerprint"]}`{_version(data)})
- Longest row: {facts["max_len"]:,} tokens, media included
- Loss on: {loss}
- Chat template: {template["version"]}, sha256 `{template["sha256"][:16]}`, saved here; an answer ends with one of the \
tokens {facts["tokens"]["stop_token_ids"]}
- Licence of the base model: {base["license"]}
{_merged(facts)}{own}
All facts are in `training_metadata.json`{warned}.

## Use

```python
{_usage(facts, adapter)}```
"""


def _front_matter(facts: dict, adapter: bool) -> str:
    from huggingface_hub import ModelCardData

    base, data = facts["base_model"], facts["data"]
    takes = facts["takes"]
    speaks = "any-to-any" if "audio" in takes else "image-text-to-text" if "image" in takes else "text-generation"
    return (
        ModelCardData(
            base_model=base["name"] if "/" in base["name"] else None,
            base_model_relation="adapter" if adapter else "finetune",
            library_name="peft" if adapter else "transformers",
            license=facts["metadata"].get("license", base["license"]),
            datasets=[name.partition(":")[0] for name in data["names"] if "/" in name] or None,
            tags=["gemma", base["family"], "trl", *TASKS[facts["task"]][1], *(["lora"] if adapter else [])],
            pipeline_tag="text-classification" if facts["task"] == "reward" else speaks,
        ).to_yaml()
        + "\n"
    )


def _inline(value) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return " ".join(text.split())


def _revision(base: dict) -> str:
    return f" (revision `{base['revision']}`)" if base["revision"] else ""


def _merged(facts: dict) -> str:
    """Of a model that an adapter was merged into: how."""
    if "merged" not in facts:
        return ""
    trained = str(facts["training"]["quantization"]).startswith("4-bit")
    beside = ", beside 4-bit weights" if trained else ""
    dtype = ", ".join(facts["merged"]["dtype"])
    return f"- Trained as a LoRA adapter{beside}, and merged into the base's weights ({dtype})\n"


def _version(data: dict) -> str:
    return f", version {_inline(data['version'])}" if data["version"] else ""


def _usage(facts: dict, adapter: bool) -> str:
    """Python that loads the model and asks it something; it runs in this folder as it stands."""
    text_only = facts["takes"] == ["text"]
    reads = "AutoTokenizer" if text_only else "AutoProcessor"
    reward = facts["task"] == "reward"
    loads = "AutoModelForCausalLM" if text_only else "AutoModelForImageTextToText"
    loads = "AutoModelForSequenceClassification" if reward else loads
    one = ", num_labels=1" if reward and adapter else ""
    lines = [
        "import gemma_trainer  # the gemma-trainer skill's assets/ on PYTHONPATH: it knows reward heads of Gemma\n"
    ]
    lines *= reward
    lines += ["from peft import PeftConfig, PeftModel\n"] * adapter
    lines += [f"from transformers import {loads}, {reads}\n\n"]
    lines += ['here = "."  # this folder, or the id of its repository\n']
    lines += [f"processor = {reads}.from_pretrained(here)\n"]
    if adapter:
        lines += ["base = PeftConfig.from_pretrained(here).base_model_name_or_path\n"]
        lines += [f"model = PeftModel.from_pretrained({loads}.from_pretrained(base{one}), here)\n"]
    else:
        lines += [f"model = {loads}.from_pretrained(here)\n"]
    question = '{"role": "user", "content": "Hello!"}'
    answer = ', {"role": "assistant", "content": "Hello to you."}' if reward else ""
    prompt = "" if reward else "add_generation_prompt=True, "
    lines += [f"messages = [{question}{answer}]\n"]
    lines += ['how = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}\n']
    lines += [f"inputs = processor.apply_chat_template(messages, {prompt}**how)\n"]
    if reward:
        return "".join([*lines, "print(model(**inputs).logits[0, 0].item())\n"])
    stops = facts["tokens"]["stop_token_ids"]
    lines += [f"answer = model.generate(**inputs, max_new_tokens=256, eos_token_id={stops})\n"]
    said = 'answer[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True'
    return "".join([*lines, f"print(processor.decode({said}))\n"])
