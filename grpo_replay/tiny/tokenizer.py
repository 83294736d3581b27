r"""The tokenizers of the tiny tasks: one token per character, and one for `\boxed{`."""

from __future__ import annotations

from string import ascii_lowercase

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
BOX = "\\boxed{"
VOCABULARY: tuple[str, ...] = (PAD, EOS, UNKNOWN, BOX, "}", *"0123456789", *"+-*=,;() ")
"""Token of each id. Other characters become `<unk>`."""

LONG_VOCABULARY: tuple[str, ...] = (*VOCABULARY, *ascii_lowercase)
"""The same for the long task, which needs letters too."""


def build_tokenizer(
    model_max_length: int, vocabulary: tuple[str, ...] = VOCABULARY
) -> PreTrainedTokenizerFast:
    """A tokenizer that adds no special tokens and decodes exactly the text it encoded."""
    ids = {token: i for i, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    every_piece = Regex(r"\\boxed\{|[\s\S]")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(every_piece, behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=model_max_length,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
