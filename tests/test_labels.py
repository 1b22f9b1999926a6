"""Which tokens are trained, token for token (rules 1 to 9 of the labels)."""

import statistics
import time

import pytest
import trl.chat_template_utils as templates
from PIL import Image

from conftest import talk, trained_runs
from gemma_trainer import demo
from gemma_trainer.collator import MultimodalCollator
from gemma_trainer.errors import CannotLoad
from gemma_trainer.rows import read_row

NAMES = ("gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5")
SHIPPED = [name for name in NAMES if hasattr(templates, f"{name}_chat_template")]
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
CALL_TEXT = '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>}<tool_call|>'


def with_empty_thought(template):
    """A Gemma 4 template whose prompt, as in 12B, 26B and 31B, ends in an empty thought when thinking is off.

    It has none behind a tool result.
    """
    start, header, end = template.rpartition("{{- '<|turn>model\\n' -}}")
    assert header and "add_generation_prompt" in start[-300:]
    thought = "{%- if not enable_thinking -%}{{- '<|channel>thought\\n<channel|>' -}}{%- endif -%}"
    return start + header + thought + end


@pytest.fixture(scope="module", params=SHIPPED)
def shipped(request):
    return demo.make_processor(request.param)


def collate(processor, row, **options):
    collator = MultimodalCollator(processor, **options)
    return collator, collator([row])


def tool_row(*after, call=None, **fields):
    messages = [{"role": "user", "content": "Weather in Oslo?"},
                {"role": "assistant", "content": "", "tool_calls": [call or CALL], **fields},
                {"role": "tool", "tool_call_id": "c1", "content": "snow"}]  # fmt: skip
    return {"messages": [*messages, *after]}


def test_every_trained_turn_ends_in_its_end_token_once(shipped):
    _, batch = collate(shipped, talk("a", "b", "c", "d", "e", "f"))
    assert trained_runs(shipped.tokenizer, batch) == ["b<turn|>", "d<turn|>", "f<turn|>"]


def test_one_bos_and_ignored_padding(shipped):
    collator = MultimodalCollator(shipped)
    batch = collator([talk("hi", "yes"), talk("What is the capital of Italy?", "Rome is the capital of Italy.")])
    bos = shipped.tokenizer.bos_token_id
    assert (batch["input_ids"] == bos).sum(1).tolist() == [1, 1]
    assert batch["attention_mask"][0].tolist() == sorted(batch["attention_mask"][0].tolist(), reverse=True)
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()


@pytest.mark.parametrize("template_bos", [True, False])
@pytest.mark.parametrize("tokenizer_bos", [True, False])
def test_one_bos_whoever_adds_it(template_bos, tokenizer_bos):
    processor = demo.make_processor()
    if not template_bos:
        processor.chat_template = processor.chat_template.replace("{{- bos_token -}}", "")
    processor.tokenizer.add_bos_token = tokenizer_bos
    _, batch = collate(processor, talk("hi", "yes"))
    ids = batch["input_ids"][0].tolist()
    assert ids[0] == processor.tokenizer.bos_token_id and ids.count(ids[0]) == 1


def test_parallel_results_and_a_result_at_the_end(processor):
    second = {"id": "c2", "type": "function", "function": {"name": "get_time", "arguments": {}}}
    row = {"messages": [{"role": "user", "content": "x"},
                        {"role": "assistant", "content": "", "tool_calls": [CALL, second]},
                        {"role": "tool", "tool_call_id": "c1", "content": "snow"},
                        {"role": "tool", "tool_call_id": "c2", "content": "noon"}]}  # fmt: skip
    _, batch = collate(processor, row)
    expected = CALL_TEXT + "<|tool_call>call:get_time{}<tool_call|><|tool_response>"
    assert trained_runs(processor.tokenizer, batch) == [expected]


def test_content_beside_a_call_is_trained_where_the_template_puts_it(processor):
    row = tool_row({"role": "assistant", "content": "Snow."})
    row["messages"][1]["content"] = "I look."
    _, batch = collate(processor, row)
    runs = trained_runs(processor.tokenizer, batch)
    assert runs == [CALL_TEXT + "<|tool_response>", "I look.<turn|>", "Snow.<turn|>"]


@pytest.mark.parametrize("untrained", [1, 3])
def test_train_false_on_a_call_or_on_the_answer_after_it(processor, untrained):
    row = tool_row({"role": "assistant", "content": "Snow."})
    row["messages"][untrained]["train"] = False
    _, batch = collate(processor, row)
    kept = {1: ["Snow.<turn|>"], 3: [CALL_TEXT + "<|tool_response>"]}
    assert trained_runs(processor.tokenizer, batch) == kept[untrained]


def test_merged_messages_are_trained_only_if_all_parts_are(processor):
    row = talk("a", "b", "c", "d")
    row["messages"].insert(2, {"role": "assistant", "content": "bad", "train": False})
    _, batch = collate(processor, row)
    assert trained_runs(processor.tokenizer, batch) == ["d<turn|>"]


def test_the_model_does_not_learn_a_prompts_own_assistant_turns(processor):
    prompt = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    _, batch = collate(processor, {"prompt": prompt, "completion": [{"role": "assistant", "content": "d"}]})
    assert trained_runs(processor.tokenizer, batch) == ["d<turn|>"]


# ---- reasoning


def test_dropped_reasoning_is_counted_and_kept_reasoning_is_not(processor):
    reasoned = {"role": "assistant", "reasoning": "Hm.", "content": "4"}
    collator, batch = collate(processor, {"messages": [{"role": "user", "content": "2+2?"}, reasoned]})
    assert collator.stats.reasoning_dropped == 1  # this template shows reasoning beside calls only
    assert trained_runs(processor.tokenizer, batch) == ["4<turn|>"]
    collator, batch = collate(processor, tool_row({"role": "assistant", "content": "Snow."}, reasoning="Look."))
    assert collator.stats.reasoning_dropped == 0
    assert "<|think|>" in processor.tokenizer.decode(batch["input_ids"][0])


def test_thought_in_content_is_reasoning(processor):
    spelled = tool_row({"role": "assistant", "content": "Snow."})
    spelled["messages"][1]["content"] = "<|channel>thought\nLook.\n<channel|>"
    given = tool_row({"role": "assistant", "content": "Snow."}, reasoning="Look.")
    assert collate(processor, spelled)[1]["input_ids"].tolist() == collate(processor, given)[1]["input_ids"].tolist()


@pytest.mark.parametrize(("thinking", "marked"), [("on", True), ("off", False), ("auto", False)])
def test_thinking_switch(processor, thinking, marked):
    _, batch = collate(processor, talk("a", "b"), thinking=thinking)
    assert ("<|think|>" in processor.tokenizer.decode(batch["input_ids"][0])) == marked


# ---- the same prompt in training as in use


def prompt_tokens(processor, row, thinking=False):
    parsed = read_row(row)
    text = processor.tokenizer.apply_chat_template(
        parsed.messages[:-1], tools=parsed.tools, chat_template=processor.chat_template, tokenize=False,
        add_generation_prompt=True, enable_thinking=thinking,
    )  # fmt: skip
    return processor.tokenizer(text, add_special_tokens=False)["input_ids"]


ROWS = {
    "plain": talk("hi", "hello"),
    "turns": talk("a\nb", "c", "d  e", "f"),
    "system": {"messages": [{"role": "system", "content": "Be brief."}, *talk("a", "b")["messages"]]},
    "after a result": tool_row({"role": "assistant", "content": "Snow."}),
    "consecutive": {"messages": [{"role": "user", "content": "a"}, *talk("b", "c")["messages"]]},
    "unicode": talk("é 中文 \u200b 🙂", "naïve ﬁ"),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("thinking", ["on", "off"])
def test_tokens_before_the_last_trained_turn_are_the_generation_prompt(shipped, row, thinking):
    collator, batch = collate(shipped, row, thinking=thinking, loss_on="last-turn")
    labels, ids = batch["labels"][0], batch["input_ids"][0].tolist()
    trained = (labels != -100).nonzero().flatten().tolist()
    last = next(i for i in reversed(trained) if i - 1 not in trained)
    prompt = prompt_tokens(shipped, row, thinking == "on")
    if collator.stats.inexact_turns:  # v5 opens a thought after a result, which an answer without one cannot follow
        assert row is ROWS["after a result"] and thinking == "on"
    elif "gemma4_v2" in SHIPPED and shipped.chat_template == templates.gemma4_v2_chat_template and "tool" in str(row):
        assert ids[:last][-len(prompt) :] == prompt
    else:
        assert ids[:last] == prompt


def test_an_empty_thought_in_the_prompt_goes_into_the_last_turn_and_is_not_trained():
    processor = demo.make_processor()
    processor.chat_template = with_empty_thought(processor.chat_template)
    collator, batch = collate(processor, talk("a", "b", "c", "d"))
    text = processor.tokenizer.decode(batch["input_ids"][0])
    assert text.endswith(
        "<|turn>model\nb<turn|>\n<|turn>user\nc<turn|>\n<|turn>model\n<|channel>thought\n<channel|>d<turn|>\n"
    )
    assert trained_runs(processor.tokenizer, batch) == ["b<turn|>", "d<turn|>"]
    assert collator.stats.inexact_turns == 1  # "b" stands behind a prompt without the empty thought
    collator, batch = collate(processor, talk("a", "b", "c", "d"), loss_on="last-turn")
    assert collator.stats.inexact_turns == 0
    collator, batch = collate(processor, tool_row({"role": "assistant", "content": "Snow."}))
    assert "<|channel>" not in processor.tokenizer.decode(batch["input_ids"][0])


def test_a_template_of_another_family_is_refused():
    processor = demo.make_processor()
    processor.chat_template = templates.gemma3_chat_template
    with pytest.raises(CannotLoad, match="does not write turns"):
        MultimodalCollator(processor)
    processor.chat_template = None
    with pytest.raises(CannotLoad, match="no chat template"):
        MultimodalCollator(processor)


# ---- raw text


def test_raw_text_is_trained_after_bos_and_ends_in_eos(processor):
    _, batch = collate(processor, {"text": "Once <turn|> upon"})
    assert trained_runs(processor.tokenizer, batch) == ["Once <turn|> upon<eos>"]
    assert processor.tokenizer.convert_tokens_to_ids("<turn|>") not in batch["input_ids"][0].tolist()


def test_raw_text_with_model_headers_is_read_back(processor):
    text = "<bos><|turn>user\nhi<turn|>\n<|turn>model\nhello<turn|>\n"
    _, batch = collate(processor, {"text": text})
    assert processor.tokenizer.decode(batch["input_ids"][0]) == text
    assert trained_runs(processor.tokenizer, batch) == ["hello<turn|>"]


def test_context_row_and_row_without_an_answer_train_nothing(processor):
    collator = MultimodalCollator(processor)
    batch = collator([talk("a", "b", loss_type="context_only"), talk("only a question")])
    assert (batch["labels"] == -100).all() and collator.stats.untrained_rows == 2


def test_pictures_of_a_tool_result_are_the_worlds(shipped):
    import numpy as np

    picture = [{"type": "image", "image": np.zeros((8, 8, 3), np.uint8)}]
    second = {"id": "c2", "type": "function", "function": {"name": "look", "arguments": {}}}
    row = {"messages": [{"role": "user", "content": "x"},
                        {"role": "assistant", "content": "", "tool_calls": [CALL, second]},
                        {"role": "tool", "tool_call_id": "c1", "content": picture},
                        {"role": "tool", "tool_call_id": "c2", "content": picture},
                        {"role": "user", "content": "and?"}, {"role": "assistant", "content": "A"}]}  # fmt: skip
    collator, batch = collate(shipped, row)
    if collator.stats.bad_rows:  # an older template has no place for them: the row is named and left out
        assert "has no place for them" in batch.problems[0][1]
        return
    calls, answer = trained_runs(shipped.tokenizer, batch)
    assert calls.startswith(CALL_TEXT) and calls.count("<|tool_response>") <= 1 and answer == "A<turn|>"


if "gemma4_v5" in SHIPPED:

    def test_steps_that_a_template_runs_together_are_counted_as_inexact():
        row = tool_row({"role": "assistant", "content": "Snow."})
        row["messages"][1]["content"] = "I look."
        collator, batch = collate(demo.make_processor("gemma4_v5"), row)
        assert trained_runs(collator.tokenizer, batch)[-1] == "I look.Snow.<turn|>"
        assert collator.stats.inexact_turns == 1


def test_a_result_that_answers_no_call_is_a_bad_row(processor):
    row = {
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "tool", "content": "lost"},
            {"role": "assistant", "content": "y"},
        ]
    }
    collator, batch = collate(processor, row)
    assert collator.stats.bad_rows == 1 and "answers no tool call" in batch.problems[0][1]


def test_raw_text_may_bring_its_own_bos_and_eos(processor):
    plain = collate(processor, {"text": "raw words"})[1]
    assert collate(processor, {"text": "<bos>raw words<eos>"})[1]["input_ids"].tolist() == plain["input_ids"].tolist()


@pytest.mark.parametrize("blank", ["", " ", "\n", [], [{"type": "text", "text": ""}]])
def test_train_false_on_a_call_with_blank_content(shipped, blank):
    row = tool_row({"role": "assistant", "content": "Snow."})
    row["messages"][1] |= {"content": blank, "train": False}
    collator, batch = collate(shipped, row)
    assert trained_runs(shipped.tokenizer, batch) == ["Snow.<turn|>"] and collator.stats.bad_rows == 0


def test_dropped_reasoning_after_an_assistants_first_word(shipped):
    messages = [{"role": "assistant", "content": "hi"}, *talk("q", "a", "q3", "b")["messages"]]
    messages[2]["reasoning"] = "R"
    collator, batch = collate(shipped, {"messages": messages})
    assert trained_runs(shipped.tokenizer, batch) == ["hi<turn|>", "a<turn|>", "b<turn|>"] and not batch.problems


def test_an_answer_whose_own_prompt_showed_reasoning_is_counted_as_inexact(processor):
    row = tool_row({"role": "assistant", "content": "Snow."}, *talk("Thanks", "Welcome")["messages"], reasoning="Look.")
    collator, _ = collate(processor, row)
    assert (collator.stats.reasoning_dropped, collator.stats.inexact_turns) == (1, 1)
    collator, _ = collate(processor, row, loss_on="last-turn")
    assert collator.stats.inexact_turns == 0


def test_a_long_talk_with_dropped_reasoning_costs_little(processor):
    row = talk(*["word"] * 400)
    for message in row["messages"][1::2]:
        message["reasoning"] = "R"

    start = time.perf_counter()
    collator, _ = collate(processor, row)
    assert collator.stats.reasoning_dropped == 200 and time.perf_counter() - start < 5


def test_a_long_tool_talk_with_dropped_reasoning_costs_little(processor):

    steps = []
    for number in range(150):
        call = {"name": "f", "arguments": {"i": number}}
        steps += [{"role": "assistant", "content": "", "reasoning": "r", "tool_calls": [call]}]
        steps += [{"role": "tool", "content": "x"}]
    row = {"messages": [{"role": "user", "content": "q"}, *steps, *talk("x", "end", "more", "ok")["messages"][1:]]}
    start = time.perf_counter()
    collator, _ = collate(processor, row, max_length=None)
    assert (collator.stats.reasoning_dropped, collator.stats.inexact_turns) == (150, 150)
    assert time.perf_counter() - start < 5


# ---- labels cost milliseconds


def long_row(kind, tokens):
    """A row of at least so many tokens: one long answer, or up to 500 turns, or 250 calls with their results."""
    if kind == "one answer":
        return talk("Say yes.", "yes " * tokens)
    said = "yes " * 64
    if kind == "500 turns":
        return talk(*["Say yes.", said] * (tokens // 64))
    result = {"role": "tool", "tool_call_id": "c1", "content": said * 2}
    steps = [{"role": "assistant", "tool_calls": [CALL]}, result] * (tokens // 128)
    return {"messages": [{"role": "user", "content": "Weather?"}, *steps, {"role": "assistant", "content": "Snow."}]}


@pytest.mark.parametrize("kind", ["one answer", "500 turns", "250 calls"])
def test_labelling_a_long_row_costs_milliseconds(processor, kind):
    labeller = MultimodalCollator(processor, None).labeller

    def cost(tokens):
        row = read_row(long_row(kind, tokens))
        rendered = labeller.renderer.render(row)
        ids = labeller.renderer.encode([rendered])[0]
        assert len(ids) >= tokens
        seconds = []
        for _ in range(9):
            start = time.process_time()
            assert labeller.label(row, rendered, ids).trained.any()
            seconds.append(time.process_time() - start)
        return statistics.median(seconds)

    short, long = cost(8_000), cost(32_000)
    assert long < 0.05
    assert long < 8 * short


def test_an_answer_of_a_picture_alone_behind_a_result_leaves_the_rest_trained(processor):
    """It has no words to train, and hinders no others."""
    picture = [{"type": "image", "image": Image.new("RGB", (20, 20))}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    row = {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "r"},
            {"role": "assistant", "content": picture},
            {"role": "user", "content": "again"},
            {"role": "assistant", "content": "wrong", "train": False},
            {"role": "user", "content": "again"},
            {"role": "assistant", "content": "right"},
        ]
    }
    collator = MultimodalCollator(processor)
    batch = collator([row])
    assert collator.stats.bad_rows == 0
    assert trained_runs(collator.tokenizer, batch) == [
        "<|tool_call>call:f{}<tool_call|><|tool_response>",
        "right<turn|>",
    ]
