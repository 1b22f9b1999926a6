"""The model answers behind the prompt it was trained behind, whatever stands in the row."""

import pytest

from conftest import ask, talk
from gemma_trainer.collator import MultimodalCollator
from gemma_trainer.generation import _read_answer, answer, media_accuracy


@pytest.mark.parametrize("options", [{}, {"placeholders": "always"}, {"thinking": "on"}, {"loss_on": "last-turn"}])
@pytest.mark.parametrize("file", ["red.png", "one.wav"])
def test_answers_to_media_rows(processor, model, media, file, options):
    said = answer(model, MultimodalCollator(processor, **options), ask(media, file), max_new_tokens=3)
    assert said["expected"] == "Yes." and isinstance(said["answer"], str)
    assert said["prompt"] == f"user: [{'image' if file[-3:] != 'wav' else 'audio'}] What is it?"


@pytest.mark.parametrize(("row", "options"), [
    (talk("x", "y", image="absent.png"), {}), (talk("x", "y", image="absent.png"), {"on_bad_media": "skip"}),
    (talk("one two three four five six", "y"), {"max_length": 5}), ({"text": "raw"}, {}), (talk("only a question"), {}),
])  # fmt: skip
def test_a_row_that_cannot_be_asked_has_no_answer(processor, model, row, options):
    assert answer(model, MultimodalCollator(processor, **options), row) is None


def test_the_prompt_is_the_generation_prompt(processor, model, media):
    row = talk("hi", "hello", "again", "bye")
    asked = {}

    class Spy:
        dtype, device = model.dtype, model.device

        def generate(self, **inputs):
            asked.update(inputs)
            return model.generate(**inputs)

    answer(Spy(), MultimodalCollator(processor), row, max_new_tokens=1)
    prompt = processor.tokenizer.apply_chat_template(
        row["messages"][:-1], chat_template=processor.chat_template, tokenize=False, add_generation_prompt=True
    )
    assert asked["input_ids"][0].tolist() == processor.tokenizer(prompt, add_special_tokens=False)["input_ids"]


def test_chance_is_the_most_common_answer_to_each_kind_of_medium(processor, model, media):
    rows = [ask(media, "red.png", answer=a) for a in ("x", "x", "y")] + [ask(media, "one.wav", answer="z")]
    found = media_accuracy(model, MultimodalCollator(processor), rows)
    assert found["chance"] == 0.75 and found["accuracy"] == 0.0


def test_a_thought_that_does_not_end_is_no_answer(processor):
    tokenizer = processor.tokenizer
    for text, said in (("<|channel>thought\nred", ""), ("<|channel>thought\nred<channel|>blue", "blue")):
        made = tokenizer.encode(text, add_special_tokens=False)
        found = _read_answer(tokenizer, made, [tokenizer.eos_token_id])
        assert (found.text, found.reasoning, found.stopped) == (said, "red", False)
