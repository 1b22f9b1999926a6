"""A Gemma loaded in this process: a hub id, a folder, or the run of a fine-tuning (a PEFT adapter)."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

from . import Chat, ChatError, parts

TRAINER = Path(__file__).resolve().parents[3] / "gemma-trainer" / "assets"
# What ends a turn; a tokenizer has those of its generation. Some config files list them only in part.
ENDS = ("<eos>", "<turn|>", "<|tool_response>", "<end_of_turn>")
# What is never quantized, by name; small beside the language model, and the first to suffer.
WHOLE = """lm_head vision_tower audio_tower vision_embedder embed_vision embed_audio multi_modal_projector altup
router""".split()


def load(name: str, quantize: bool = False) -> Chat:
    """Load a model to talk to.

    Args:
        name: a hub id, the folder of a model or of an adapter, or "demo".
        quantize: hold its weights in 4 bits, on CUDA.

    Raises:
        ChatError: it cannot be loaded, or is not for talking.
    """
    if quantize:
        import torch

        if not torch.cuda.is_available():
            told = "--quantize 4bit needs an NVIDIA GPU: leave it out, or serve the model and use --endpoint"
            raise ChatError(told, 4)
    if name == "demo":
        return chat_with("demo", *_demo())
    if name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir():
        raise ChatError(f"--model {name}: no such folder")
    warnings.filterwarnings("ignore", message=r"Unexpected keyword arguments \['custom_metadata'\]")  # gemma-trainer's
    folder = Path(name).expanduser()
    name = str(folder) if folder.is_dir() else name
    base = _base_of(name) if (folder / "adapter_config.json").is_file() else name
    # A run has the processor and chat template that it was trained with.
    processor_from = name if (folder / "tokenizer_config.json").is_file() else base
    try:
        processor, model = _load(base, processor_from, quantize)
        if base != name:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, name)
    except (ChatError, ImportError, MemoryError):
        raise
    except Exception as problem:  # broken files make transformers raise whatever they happen to hit
        if _is_out_of_memory(problem):
            raise
        raise ChatError(_advice(base, problem)) from None
    return chat_with(Path(name).resolve().name if folder.is_dir() else name, processor, model.eval())


def _base_of(adapter: str) -> str:
    """The model that an adapter belongs to; where that folder has moved, the one in the run."""
    from peft import PeftConfig

    try:
        config = PeftConfig.from_pretrained(adapter)
    except Exception as problem:
        raise ChatError(f"{adapter}: no adapter can be loaded ({_first_line(problem)})") from None
    if "SEQ_CLS" in str(config.task_type):
        raise ChatError(f"{adapter} is a reward model, which scores and does not speak")
    base, folder = config.base_model_name_or_path, Path(adapter).resolve()
    moved = [place for place in (folder / "base-model", folder.parent / "base-model") if place.is_dir()]
    return str(moved[0]) if moved and not Path(base).is_dir() else base


def _load(base: str, processor_from: str, quantize: bool):
    """(processor, model), the model on the best device here."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

    config = AutoConfig.from_pretrained(base)
    text_only = not hasattr(config, "vision_config") and not hasattr(config, "audio_config")
    processor = (AutoTokenizer if text_only else AutoProcessor).from_pretrained(processor_from)
    options = {"dtype": "auto"}
    if quantize:
        from transformers import BitsAndBytesConfig

        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
            llm_int8_skip_modules=[rf".*\b{name}" for name in WHOLE],
        )
    if torch.cuda.is_available():
        options["device_map"] = "auto"
    model = (AutoModelForCausalLM if text_only else AutoModelForImageTextToText).from_pretrained(base, **options)
    return processor, model.to("mps") if torch.backends.mps.is_available() else model


def _demo():
    """(processor, model) of the tiny Gemma 4 with random weights, which the gemma-trainer skill makes."""
    if TRAINER.is_dir():
        sys.path.insert(0, str(TRAINER))
    try:
        from gemma_trainer import demo
    except ModuleNotFoundError as problem:
        if problem.name != "gemma_trainer":
            raise
        raise ChatError("--model demo needs the gemma-trainer skill beside this one") from None
    processor = demo.make_processor()
    return processor, demo.make_model(processor.tokenizer)


def chat_with(name: str, processor, model) -> Chat:
    """A chat with a loaded model.

    Raises:
        ChatError: it has no chat template.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    if not getattr(processor, "chat_template", None):
        raise ChatError(f"{name} has no chat template: take the model whose name ends in -it")
    towers = {"image": ("vision_config", "image_processor"), "audio": ("audio_config", "feature_extractor")}
    kinds = tuple(
        kind
        for kind, (tower, reader) in towers.items()
        if getattr(model.config, tower, None) and getattr(processor, reader, None)
    )
    config = model.generation_config
    ends = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids([end for end in ENDS if end in tokenizer.vocab])]
    listed = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    config.eos_token_id = sorted({token for token in [*listed, *ends] if token is not None})
    config.pad_token_id = tokenizer.pad_token_id

    def answer(messages: list[dict], temperature: float, max_tokens: int, thinking: str) -> Iterator[list[parts.Part]]:
        inputs = _prompt(processor, model, messages, thinking)
        length, most = inputs["input_ids"].shape[1], model.config.get_text_config().max_position_embeddings
        if length + max_tokens > most:
            told = f"{length} tokens of conversation and {max_tokens} of answer are more than the model's {most}"
            raise ChatError(f"{told}: clear the chat, or ask for a shorter answer")
        yield from _generate(model, tokenizer, inputs, temperature, max_tokens)

    return Chat(
        name,
        kinds,
        ("off", "on") if "enable_thinking" in processor.chat_template else (),
        float(config.temperature or 1.0) if config.do_sample else 0.0,
        answer,
    )


def _prompt(processor, model, messages: list[dict], thinking: str) -> dict:
    """The conversation as tensors on the model's device."""
    import torch

    told = [message | {"content": _as_text_if_possible(message["content"])} for message in messages]
    inputs = processor.apply_chat_template(
        told,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        **({"enable_thinking": thinking == "on"} if thinking else {}),
    )
    inputs = {key: value.to(model.device) for key, value in inputs.items() if isinstance(value, torch.Tensor)}
    floats = {key: value.to(model.dtype) for key, value in inputs.items() if value.is_floating_point()}
    return inputs | floats


def _as_text_if_possible(blocks: list[dict]) -> str | list[dict]:
    """Text alone as a string, which every template takes."""
    return "\n".join(b["text"] for b in blocks) if all(b["type"] == "text" for b in blocks) else blocks


def _generate(model, tokenizer, inputs: dict, temperature: float, max_tokens: int) -> Iterator[list[parts.Part]]:
    """The answer's parts so far, again and again, while the model writes in a thread of its own.

    Closing the iterator stops the model at its next token.
    """
    import torch
    from transformers import TextIteratorStreamer

    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=False)
    stopped, problems = threading.Event(), []
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}

    def work():
        try:
            with torch.inference_mode():
                model.generate(
                    **inputs,
                    **sampling,
                    max_new_tokens=max_tokens,
                    streamer=streamer,
                    stopping_criteria=[lambda ids, _: torch.full((len(ids),), stopped.is_set(), device=ids.device)],
                )
        except Exception as problem:
            problems.append(problem)
        finally:
            streamer.end()

    thread, raw = threading.Thread(target=work, daemon=True), ""
    thread.start()
    try:
        for piece in streamer:
            raw += piece
            yield parts.split(raw)
    finally:
        stopped.set()
        thread.join()
    if problems:
        raise _told(problems[0]) from problems[0]


def _told(problem: Exception) -> Exception:
    """An error of generating, as it is told in the page."""
    if not _is_out_of_memory(problem):
        return problem
    import torch

    with contextlib.suppress(Exception):
        torch.cuda.empty_cache()
    return ChatError("out of memory: clear the chat, take a smaller picture, or ask for a shorter answer", 6)


def _is_out_of_memory(problem: BaseException) -> bool:
    memory = r"out of memory|can(no|')t allocate memory|failed to map segment"
    return isinstance(problem, MemoryError) or bool(re.search(memory, str(problem), re.I))


def _advice(name: str, problem: Exception) -> str:
    text = str(problem).lower()
    if "gated" in text or "401" in text or "403" in text:
        return f"{name} is gated: accept its licence on its model page, then log in with `hf auth login`"
    if Path(name).is_dir():
        return f"{name} is a folder, but no model can be loaded from it ({_first_line(problem)})"
    return f"{name} cannot be loaded: no such folder, not in the local cache, and not to be had from the hub (offline?)"


def _first_line(problem: Exception) -> str:
    return f"{type(problem).__name__}: {(str(problem).strip().splitlines() or [''])[0]}"[:200]
