"""Every format of a row becomes the same canonical row, and what cannot be read says why."""

import copy

import pytest

from conftest import talk
from gemma_trainer.errors import RowError
from gemma_trainer.rows import SOURCE, read_row
from gemma_trainer.slots import Media

PEAR = [{"role": "user", "content": "Name a fruit"}, {"role": "assistant", "content": "Pear"}]


@pytest.mark.parametrize("raw", [
    {"messages": PEAR},
    {"messages": [{"role": "user", "content": "Name a fruit"}, {"role": "model", "content": "Pear"}], "id": 7},
    {"messages": '[{"role": "user", "content": "Name a fruit"}, {"role": "assistant", "content": "Pear"}]'},
    {"prompt": "Name a fruit", "completion": "Pear"},
    {"prompt": [PEAR[0]], "completion": [PEAR[1]]},
    {"instruction": "Name a fruit", "output": "Pear"},
    {"instruction": "Name a fruit", "input": None, "output": "Pear"},
    {"conversations": [{"from": "human", "value": "Name a fruit"}, {"from": "gpt", "value": "Pear"}]},
    {"text": "<bos><start_of_turn>user\nName a fruit<end_of_turn>\n<start_of_turn>model\nPear<end_of_turn>\n"},
    {"text": "<|turn>user\nName a fruit<turn|>\n<|turn>model\nPear"},
    {"messages": PEAR, "tools": None, "images": None, "audio": None},
    {"messages": [m | {"tool_calls": None, "reasoning": None, "name": None} for m in PEAR]},
])  # fmt: skip
def test_one_canonical_row_from_every_format(raw):
    before = copy.deepcopy(raw)
    row = read_row(raw)
    assert (row.messages, row.tools, row.media, row.text) == (PEAR, None, [], None)
    assert raw == before


def test_alpaca_input_joins_the_instruction():
    assert read_row({"instruction": "Sum", "input": "1 2", "output": "3"}).messages[0]["content"] == "Sum\n\n1 2"


@pytest.mark.parametrize(("raw", "reason"), [
    ({"question": "x", "answer": "y"}, "no known format; found: answer, question; accepted: messages"),
    ({"chosen": "a", "rejected": "b", "prompt": "c"}, "preference row"),
    ({"messages": []}, "at least one message"),
    ({"messages": "hello"}, "string that is not JSON"),
    ({"messages": [{"role": "narrator", "content": "x"}]}, "unknown role 'narrator'"),
    ({"messages": ["hi"]}, "a message must be an object"),
    ({"messages": [{"role": "user", "content": 5}]}, "content must be a string or a list"),
    ({"messages": [{"role": "user", "content": [{"type": "video", "video": "x.mp4"}]}]}, "video blocks are not"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "an image block without its image"),
    ({"messages": [{"role": "user", "content": [{"type": "pdf"}]}]}, "unknown content block type 'pdf'"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}], "images": ["a.png", "b.png"]}, "1 more image"),
    ({"text": "<|turn>user\nx<turn|>\nstray\n<|turn>model\ny<turn|>"}, "text outside its turns"),
    ({"text": "<|turn>model\n<|tool_call>call:f{}<tool_call|>"}, "tool or media tokens"),
    ({"text": "a story", "images": ["a.png"]}, "no place for media"),
    ({"text": 5}, "text must be a string"),
    ({"messages": PEAR, "loss_type": "sometimes"}, "loss_type must be"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{oops"}]}]}, "are not JSON"),
    ([1, 2], "a row must be an object"),
    ({"messages": [{"role": "user", "content": "half \ud800"}]}, "half a surrogate pair"),
    ({"messages": [{"role": "assistant", "tool_calls": ["x"]}]}, "a tool call must be an object"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": "x"}]}]}, "a tool call must be an object"),
    ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "a tool call must be an object"),
    ({"messages": [{"from": "function_call", "value": "{oops"}]}, "a tool call that is not JSON"),
    ({"messages": [{"role": "user", "content": {"type": "video", "video": "x"}}]}, "video blocks are not"),
    ({"messages": [PEAR[0], PEAR[1] | {"train": "false"}]}, "train must be true or false"),
    ({"text": "<|turn>user\nHi\n<|turn>model\nHello<turn|>"}, "not closed before the next"),
    ({"messages": PEAR, "tools": 5}, "tools must be a list"),
    ({"my secret diary": "x", "b": "y"}, "found: b and 1 that are no names"),
])  # fmt: skip
def test_what_cannot_be_read_names_the_row_and_the_reason(raw, reason):
    if isinstance(raw, dict):
        raw[SOURCE] = ("rows.jsonl:7", "/data")
    with pytest.raises(RowError) as caught:
        read_row(raw, "rows.jsonl:7")
    assert str(caught.value).startswith("rows.jsonl:7: ") and reason in str(caught.value)


def test_an_error_never_quotes_the_data():
    secret = "my secret diary entry"
    for raw in (
        {"messages": secret},
        {"messages": [{"role": secret * 9, "content": ""}]},
        {"text": f"<|turn>model\n{secret}<turn|>x"},
    ):
        with pytest.raises(RowError) as caught:
            read_row(raw)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize("block", [
    {"type": "image", "image": "a.png"}, {"type": "image", "url": "a.png"}, {"type": "image", "path": "a.png"},
    {"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "image_url", "image_url": "a.png"},
    {"image": "a.png"}, {"type": "input_image", "image_url": "a.png"},
    {"type": "image", "image": "a.png", "audio": None, "text": None},
])  # fmt: skip
def test_media_is_found_under_every_key(block):
    row = read_row({"messages": [{"role": "user", "content": [block]}]})
    assert row.media == [Media("image", "a.png")]
    assert row.messages[0]["content"] == [{"type": "image"}]


def test_openai_audio_becomes_a_data_uri():
    block = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
    assert read_row(talk([block], "x")).media == [Media("audio", "data:audio/wav;base64,UklGRg==")]


def test_columns_fill_placeholders_in_order_or_go_before_the_first_user_text():
    filled = read_row(
        talk([{"type": "text", "text": "A"}, {"type": "image"}, {"type": "audio"}], "x", image="i", audios=["a"])
    )
    assert filled.media == [Media("image", "i"), Media("audio", "a")]
    front = read_row(talk("look", "x", images=["i", "j"], audio={"bytes": b"b", "path": None}))
    assert [block["type"] for block in front.messages[0]["content"]] == ["image", "image", "audio", "text"]
    assert front.media == [Media("image", "i"), Media("image", "j"), Media("audio", {"bytes": b"b"})]
    marked = read_row(talk("one <image> two <image>?", "x", images=["i", "j"]))
    assert [block["type"] for block in marked.messages[0]["content"]] == ["text", "image", "text", "image", "text"]


def test_placeholder_words_stay_text_where_no_media_are_given():
    assert read_row(talk("the <image> tag", "x")).messages[0]["content"] == "the <image> tag"


def test_consecutive_messages_merge_but_tool_results_do_not():
    tools = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}]}
    raw = [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]},
           {"role": "assistant", "content": "c"}, {"role": "model", "content": "d", "train": False}]  # fmt: skip
    user, assistant, *results = read_row({"messages": [*raw[:4], call, *tools]}).messages
    assert user["content"] == [{"type": "text", "text": "a\nb"}]
    assert (assistant["content"], assistant["train"], len(assistant["tool_calls"])) == ("c\nd", False, 1)
    assert results == tools


def test_tool_calls_are_normalised():
    flat = {"name": "f", "arguments": '{"city": "Oslo"}'}
    row = read_row(
        {
            "messages": [PEAR[0], {"role": "assistant", "content": None, "tool_calls": [flat]}],
            "tools": '[{"name": "f"}]',
        }
    )
    assert row.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"city": "Oslo"}}
    assert row.tools == [{"type": "function", "function": {"name": "f"}}]


def test_sharegpt_calls_may_be_several_and_untrained():
    value = '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": "{}"}]'
    row = read_row(
        {"conversations": [{"from": "human", "value": "x"}, {"from": "function_call", "value": value, "train": 0}]}
    )
    assert len(row.messages[1]["tool_calls"]) == 2 and row.messages[1]["train"] is False


def test_text_with_windows_line_ends_is_read_back():
    text = "<bos><|turn>user\r\nName a fruit<turn|>\r\n<|turn>model\r\nPear<turn|>\r\n"
    assert read_row({"text": text}).messages == PEAR


def test_openai_weight_zero_is_not_trained():
    assert read_row({"messages": [PEAR[0], PEAR[1] | {"weight": 0}]}).messages[1]["train"] is False


def tool_talk(*results, ids=("c1", "c2")):
    calls = [
        {"id": call, "type": "function", "function": {"name": name, "arguments": {}}}
        for call, name in zip(ids, ("f", "g"), strict=True)
    ]
    asked = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    return {"messages": [*asked, *({"role": "tool", "content": "r"} | result for result in results)]}


@pytest.mark.parametrize(("results", "answered"), [
    ([{"tool_call_id": "c2"}, {"tool_call_id": "c1"}], ["c2", "c1"]),
    ([{}, {}], ["c1", "c2"]),
    ([{"name": "g"}, {"name": "f"}], ["c2", "c1"]),
    ([{"tool_call_id": "c1"}, {}], ["c1", "c2"]),
])  # fmt: skip
def test_a_result_that_does_not_say_its_call_is_the_next_calls(results, answered):
    row = tool_talk(*results)
    assert [m["tool_call_id"] for m in read_row(row).messages[2:]] == answered
    assert row == tool_talk(*results)


@pytest.mark.parametrize("results", [[{"tool_call_id": "other"}], [{}, {}, {}]])
def test_a_result_of_no_call_is_refused(results):
    with pytest.raises(RowError, match="tool_call_id is that of no call before it"):
        read_row(tool_talk(*results))
