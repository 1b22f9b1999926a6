"""A reward model of every Gemma family: the score of a text with its images and audio.

It is the language model's hidden state of the last real token, [H], times the head's weight, [num_labels, H].
transformers has such classes for Gemma 3 only, which look for the last token that is no padding token and go wrong
where the padding holds others; ours go by the attention mask. With this package imported, the auto class gives them,
in place of those of Gemma 3, too (see auto_class.py):

    import gemma_trainer
    model = AutoModelForSequenceClassification.from_pretrained("google/gemma-4-E2B-it", num_labels=1)
    rewards = model(**batch).logits  # [B, 1]
"""

from __future__ import annotations

import torch
from transformers import AutoModel, AutoModelForSequenceClassification
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutputWithPast
from transformers.models.gemma3 import modeling_gemma3 as gemma3
from transformers.models.gemma3n.configuration_gemma3n import Gemma3nTextConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nPreTrainedModel
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4PreTrainedModel
from transformers.models.gemma4_unified.configuration_gemma4_unified import (
    Gemma4UnifiedConfig,
    Gemma4UnifiedTextConfig,
)
from transformers.models.gemma4_unified.modeling_gemma4_unified import Gemma4UnifiedPreTrainedModel
from transformers.utils import can_return_tuple

from .errors import CannotLoad


class _Float32Linear(torch.nn.Linear):
    """A linear layer without bias that computes in float32 whatever the weights' dtype, and under autocast, too.

    In bfloat16 a reward of 10 and one of 10.03 are the same number. It is a layer of its own because PEFT, which trains
    a copy of the head, calls the copy.
    """

    def forward(self, hidden):
        """hidden: [B, H] of any dtype -> [B, num_labels] float32."""
        with torch.autocast(hidden.device.type, enabled=False):
            return torch.nn.functional.linear(hidden.float(), self.weight.float())


def last_real_token(attention_mask) -> torch.Tensor:
    """Where each row's last attended token stands: [B, T] -> [B], whichever side the padding is on."""
    positions = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    return (positions * (attention_mask != 0)).argmax(1)


class _Scoring(GenericForSequenceClassification):
    """What the classes below share; the rest comes from their family's `PreTrainedModel`."""

    accepts_loss_kwargs = False  # the loss is a mean over the rows, so Trainer has to average accumulated steps

    def __init__(self, config):
        super(GenericForSequenceClassification, self).__init__(config)  # whose own would make a head of another kind
        self.num_labels = config.num_labels
        self.model = AutoModel.from_config(config)
        self.score = _Float32Linear(config.get_text_config().hidden_size, config.num_labels, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        inputs_embeds=None,
        labels=None,
        *,
        margin=None,
        completion_mask=None,
        **kwargs,
    ) -> SequenceClassifierOutputWithPast:
        """Score each row.

        Args:
            input_ids: [B, T]; or `inputs_embeds` [B, T, H].
            attention_mask: [B, T], 0 where there is padding on either side, whatever tokens stand there; without it
                the last position is scored.
            labels: [B], what `config.problem_type` wants: with num_labels=1 numbers to be met in squared error.
            margin, completion_mask: not used; TRL's trainers hand over all they have.
            kwargs: what the family's model takes: media tensors and token type ids.

        Returns:
            `logits` [B, num_labels] float32, and with labels `loss`.
        """
        kwargs.setdefault("use_cache", False)  # nothing is generated
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs)
        hidden = outputs.last_hidden_state
        last = -1 if attention_mask is None else last_real_token(attention_mask).to(hidden.device)
        logits = self.score(hidden[torch.arange(len(hidden), device=hidden.device), last])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutputWithPast(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


# Named like transformers' own, which read what these save. Its loss is chosen by the end of the name.
class Gemma3ForSequenceClassification(_Scoring, gemma3.Gemma3ForSequenceClassification):
    pass


class Gemma3TextForSequenceClassification(_Scoring, gemma3.Gemma3TextForSequenceClassification):
    pass


class Gemma3nForSequenceClassification(_Scoring, Gemma3nPreTrainedModel):
    pass


class Gemma3nTextForSequenceClassification(_Scoring, Gemma3nPreTrainedModel):
    config_class = Gemma3nTextConfig
    input_modalities = ("text",)


class Gemma4ForSequenceClassification(_Scoring, Gemma4PreTrainedModel):
    pass


class Gemma4TextForSequenceClassification(_Scoring, Gemma4PreTrainedModel):
    config_class = Gemma4TextConfig
    input_modalities = ("text",)


class Gemma4UnifiedForSequenceClassification(_Scoring, Gemma4UnifiedPreTrainedModel):
    config_class = Gemma4UnifiedConfig


class Gemma4UnifiedTextForSequenceClassification(_Scoring, Gemma4UnifiedPreTrainedModel):
    config_class = Gemma4UnifiedTextConfig
    input_modalities = ("text",)


CLASSES = {
    model.config_class: model
    for model in (
        Gemma3ForSequenceClassification,
        Gemma3TextForSequenceClassification,
        Gemma3nForSequenceClassification,
        Gemma3nTextForSequenceClassification,
        Gemma4ForSequenceClassification,
        Gemma4TextForSequenceClassification,
        Gemma4UnifiedForSequenceClassification,
        Gemma4UnifiedTextForSequenceClassification,
    )
}
# `AutoModelForSequenceClassification.register` does nothing for config classes that are transformers' own.
AutoModelForSequenceClassification._model_mapping._extra_content.update(CLASSES)


def reward_class(config) -> type:
    """The reward model's class for a transformers config.

    Raises:
        CannotLoad: no supported family has such a config.
    """
    if type(config) not in CLASSES:
        known = ", ".join(kind.model_type for kind in CLASSES)
        raise CannotLoad(f"no reward model for model type {config.model_type!r}; supported: {known}")
    return CLASSES[type(config)]
