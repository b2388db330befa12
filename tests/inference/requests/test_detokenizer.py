"""The streamed text is that of all tokens decoded at once, for tokenizers of all families.

The twin decodes all tokens again after each one.
"""

import random
from functools import cache

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from eagle_train.inference import Engine, SamplingParams
from eagle_train.inference.cache.prefix import BLOCK
from eagle_train.inference.requests.detokenizer import Detokenizer, Texts
from eagle_train.inference.requests.marked_text import MarkedText
from eagle_train.inference.requests.sequence import Sequence
from eagle_train.terminal import GREEN, RESET
from tests.support.reference_answers import guide, token_ids
from tests.support.tiny import random_tokens, tiny_draft, tiny_target

TEXT = "The naïve café’s 東京 menu — 12 €! 👩‍👩‍👧 says: don't  stop\n\tнет, 'ok' . \ufffd é\u0301"
SPECIAL = ["<pad>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
UNDECODED = "\ufffd"
EOS = 2


class ByItself(PreTrainedTokenizerFast):
    """A tokenizer with its own `decode`."""

    def _decode(self, *given, **options) -> str:
        return super()._decode(*given, **options).swapcase()


def wrapped(tokenizer: Tokenizer, kind: type = PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """With special tokens, and an added token that has text."""
    tokenizer.add_tokens([AddedToken("[tool]", special=False)])
    return kind(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen: bytes, and pairs of bytes that may be parts of characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return tokenizer


def pieces() -> dict[str, int]:
    """A vocabulary as SentencePiece makes it, with byte tokens."""
    words = ["▁", "▁▁", "▁the", "the", "▁cafe", "é", "東", "ing", ".", "'t", "\n", UNDECODED, "x▁", "ab", "b"]
    return {token: i for i, token in enumerate([*SPECIAL, "<unk>", *BYTES, *words])}


def byte_fallback() -> Tokenizer:
    """As Llama 2, Mistral and Gemma."""
    tokenizer = Tokenizer(models.BPE(pieces(), [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def metaspace() -> Tokenizer:
    """As T5 and XLM."""
    tokenizer = Tokenizer(models.WordLevel(pieces(), unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def word_pieces() -> Tokenizer:
    words = ["the", "##s", "##", "do", "n't", "'m", ".", ",!", "a", "##é", "東"]
    tokenizer = Tokenizer(models.WordPiece({t: i for i, t in enumerate([*SPECIAL, *words])}, unk_token="<pad>"))
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    return tokenizer


def suffixes() -> Tokenizer:
    """As the first GPT: the last piece of a word is marked."""
    words = ["the</w>", "</w>", "a", "b</w>", "é", "東</w>"]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate([*SPECIAL, *words])}, unk_token="<pad>"))
    tokenizer.decoder = decoders.BPEDecoder()
    return tokenizer


def spaced() -> Tokenizer:
    """Without a decoder."""
    return Tokenizer(
        models.WordLevel({t: i for i, t in enumerate([*SPECIAL, "the", "a", "b", "東"])}, unk_token="<pad>")
    )


MAKERS = {maker.__name__: maker for maker in (byte_level, byte_fallback, metaspace, word_pieces, suffixes, spaced)}


@cache
def texts_of(name: str) -> Texts:
    maker, _, by_itself = name.partition(", ")
    return Texts(wrapped(MAKERS[maker](), ByItself if by_itself else PreTrainedTokenizerFast))


def whole(texts: Texts, tokens: list[int]) -> str:
    return texts.tokenizer.decode(tokens, skip_special_tokens=True)


def random_answer(texts: Texts, rng: random.Random) -> list[int]:
    """Random tokens, or those of a text with others in between; special, unknown and repeated ones."""
    size = len(texts.tokenizer)
    stray = [0, 1, 2, size, size + 7, size - 1, rng.randrange(size)]
    if rng.random() < 0.5:
        start = rng.randrange(len(TEXT))
        sure = texts.tokenizer(TEXT[start:] + TEXT)["input_ids"]
        return [token for each in sure[:90] for token in ([each] if rng.random() < 0.9 else [rng.choice(stray), each])]
    some = [rng.randrange(size) for _ in range(rng.choice([3, 40]))] + stray[:2]
    few = [rng.choice(some) for _ in range(2)]
    return rng.choices(some, k=rng.randint(1, 60)) + rng.choices(few, k=rng.choice([0, 30])) + rng.choices(some, k=9)


def rounds_of(tokens: list[int], rng: random.Random) -> list[list[int]]:
    rounds = []
    while tokens:
        count = rng.randint(1, 4)
        rounds.append(tokens[:count])
        tokens = tokens[count:]
    return rounds


@pytest.mark.parametrize("name", [*MAKERS, "byte_level, by itself"])
def test_pieces_make_the_whole(name):
    """And nothing is held back needlessly: only incomplete bytes at the end, or a run of byte tokens there."""
    texts, rng = texts_of(name), random.Random(0)
    for _ in range(150):
        told, read, detokenizer = "", [], Detokenizer(texts)
        tokens = random_answer(texts, rng)
        for some in rounds_of(tokens, rng):
            detokenizer.add(some)
            read += some
            told += detokenizer.new_text(final=False)
            now = whole(texts, read)
            sure = [token for token in read if texts.shows(token)]
            while sure and texts.tokenizer.convert_ids_to_tokens(sure[-1]) in BYTES:
                sure.pop()
            assert told == now or told == whole(texts, sure).removesuffix(UNDECODED) or told + UNDECODED == now
        assert told + detokenizer.new_text(final=True) == whole(texts, tokens)


def twin(texts: Texts, tokens: list[int], stop_strings: tuple[str, ...]) -> tuple[int, str]:
    """After how many tokens the text holds a stop string, and the text before it."""
    for length in range(1, len(tokens) + 1):
        text = whole(texts, tokens[:length])
        found = [text.index(string) for string in stop_strings if string in text]
        if found:
            return length, text[: min(found)]
    return len(tokens), text


@pytest.mark.parametrize("name", MAKERS)
def test_stop_strings(name):
    """Wherever they are divided over tokens and rounds, alone or nested."""
    texts, rng, cuts = texts_of(name), random.Random(1), 0
    for _ in range(250):
        tokens = random_answer(texts, rng)
        text, stop_strings = whole(texts, tokens).replace(UNDECODED, ""), []
        for _ in range(rng.randint(1, 3)):
            start = rng.randrange(max(1, len(text)))
            piece = text[start : start + rng.choice([1, 2, 3, 9])]
            stop_strings.append(piece + rng.choice(["", "", "~", piece]))
        stop_strings = tuple(string for string in stop_strings if string)
        told, detokenizer, ended = "", Detokenizer(texts, stop_strings), False
        for some in rounds_of(tokens, rng):
            for token in some:
                detokenizer.add([token])
                if ended := detokenizer.has_stop_string():
                    break
            if ended:
                break
            told += detokenizer.new_text(final=False)
        told += detokenizer.new_text(final=True)
        assert (detokenizer.num_tokens, told) == twin(texts, tokens, stop_strings)
        cuts += ended
    assert 50 < cuts < 250


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_stop_string_within_the_first_tokens_is_text(at_once, told):
    """Also where these end within a character, or in the run of bytes that the string is of."""
    texts = texts_of("byte_fallback")
    character = ["<0xE4>", "<0xBD>", "<0xA0>", "."]
    for own in (["ab"], ["<0x61>", "<0x62>"]):
        tokens = texts.tokenizer.convert_tokens_to_ids([*own, *character])
        for least in range(len(tokens) + 1):
            detokenizer, found, stopped = Detokenizer(texts, ("ab",), min_tokens=least), "", False
            first = [tokens[:least]] if at_once else [[token] for token in tokens[:least]]
            for some in [*first, *([token] for token in tokens[least:])]:
                detokenizer.add(some)
                if stopped := detokenizer.has_stop_string():
                    break
                found += detokenizer.new_text(final=False) if told else ""
            found += detokenizer.new_text(final=True)
            assert stopped == (least < len(own))
            assert found == ("" if stopped else whole(texts, tokens))


def test_what_may_begin_a_stop_string_waits():
    texts = texts_of("byte_level")
    for text, told in (
        ("a<|", "a"),
        ("a<|e", "a"),
        ("a<|en<", "a<|en"),
        ("a<|b<|end|", "a<|b"),
        ("ab-", "ab"),
        ("ab--", "ab"),
        ("ab---", "ab-"),
        ("ab€", "ab€"),
    ):
        detokenizer = Detokenizer(texts, ("<|end|>", "--!"))
        detokenizer.add(texts.tokenizer(text)["input_ids"])
        assert not detokenizer.has_stop_string()
        assert detokenizer.new_text(final=False) == told
        assert detokenizer.new_text(final=False) == ""
        assert told + detokenizer.new_text(final=True) == text


@pytest.mark.parametrize(("name", "byte"), [("byte_level", "Ã"), ("byte_fallback", "<0xC3>")])
def test_a_stop_string_of_undecoded_bytes(name, byte):
    """An incomplete character is not the replacement character; one that can never be completed is."""
    texts = texts_of(name)
    half, after = texts.tokenizer.convert_tokens_to_ids([byte, "b"])
    detokenizer = Detokenizer(texts, (UNDECODED,))
    for token, stopped in ((after, False), (half, False), (after, True)):
        detokenizer.add([token])
        assert detokenizer.has_stop_string() == stopped
    assert detokenizer.new_text(final=True) == "b"


@pytest.mark.parametrize("name", MAKERS)
def test_the_cost_of_a_token_does_not_grow(name, monkeypatch):
    """Whatever is repeated: a special token, a part of a character, a space."""
    texts, sizes, decode = texts_of(name), [], Texts.decode

    def counting(self, tokens):
        sizes.append(len(tokens))
        return decode(self, tokens)

    monkeypatch.setattr(Texts, "decode", counting)
    for token in range(len(texts.tokenizer) + 2):
        for stop_strings in ((), ("~~",)):
            detokenizer = Detokenizer(texts, stop_strings)
            for _ in range(50):
                detokenizer.add([token] * 2)
                if token not in texts.bytes:  # a run of these is one text or none
                    detokenizer.has_stop_string()
                detokenizer.new_text(final=False)
    assert max(sizes) <= 20


# --- in the engine


@pytest.fixture(scope="module")
def talking():
    """A target whose tokens are bytes, most of them parts of characters."""
    names = pre_tokenizers.ByteLevel(False).pre_tokenize_str("€é東👩ab <~>")
    letters = list(dict.fromkeys(names[0][0] + "".join(name for name, _ in names[1:])))
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tiny_target("llama", wrapped(tokenizer), vocab_size=len(vocabulary) + 2)


@pytest.mark.parametrize("cancelling", [False, True], ids=["kept", "cancelled"])
@pytest.mark.parametrize("tree", ["chain3", "d3_bf2"])
def test_updates_make_the_output(tree, cancelling, talking):
    """Tokens and texts, with drafts accepted to any depth, stop strings, and cancelled requests."""
    rng, target = random.Random(3), talking
    prompts = random_tokens(*[3 + i % 5 for i in range(24)], vocabulary=target.identity.vocab_size)
    stops = [None, "a", ("<", "b"), ("€", "~>", "é ")]
    params = [SamplingParams(max_tokens=40, ignore_eos=i % 3 > 0, stop=stops[i % 4]) for i in range(len(prompts))]
    free = Engine(target, max_batch_size=24).generate(prompts, SamplingParams(max_tokens=44, ignore_eos=True))
    engine = Engine(target, tiny_draft(target), tree, max_batch_size=5, prefill_tokens=9, kv_tokens=8 * BLOCK)
    guide(engine, token_ids(free), lambda _: rng.randint(0, 3))
    requests = [engine.add(*each) for each in zip(prompts, params, strict=True)]
    tokens, texts, outputs = {each: [] for each in requests}, dict.fromkeys(requests, ""), {}
    while engine.has_unfinished:
        if cancelling and rng.random() < 0.3:
            engine.cancel(rng.choice(requests))
        for update in engine.step():
            tokens[update.request] += update.token_ids
            texts[update.request] += update.text
            if update.output:
                outputs[update.request] = update.output
    assert (len(outputs) < len(requests)) == cancelling
    lengths = set()
    for request, own, most in zip(requests, params, free, strict=True):
        output = outputs.get(request) or engine.output(request)
        assert (output.token_ids, output.text) == (tokens[request], texts[request])
        whole_answer = most.token_ids[:40]
        if EOS in whole_answer and not own.ignore_eos:
            whole_answer = whole_answer[: whole_answer.index(EOS) + 1]
        length, text = twin(Texts(target.tokenizer), whole_answer, own.stop_strings)
        if request in outputs:
            assert (output.token_ids, output.text) == (most.token_ids[:length], text)
        else:
            assert (request.finish_reason, output.text) == ("cancelled", text[: len(output.text)])
            assert output.token_ids == most.token_ids[: len(output.token_ids)]
        lengths.add(len(output.token_ids))
    assert len(lengths) > 5


def test_without_a_tokenizer_there_is_no_text():
    engine = Engine(tiny_target())
    engine.add([5], SamplingParams(max_tokens=3))
    assert {update.text for _ in range(3) for update in engine.step()} == {None}


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_the_marked_answer_of_generate(name):
    """Without its marks it is the answer, however rounds divide characters and the stop string, and however many
    rounds are shown at once."""
    texts, rng = texts_of(name), random.Random(5)
    for _ in range(50):
        tokens = random_answer(texts, rng)
        text = whole(texts, tokens)
        stop_strings = (text[5:9],) if len(text) > 9 and UNDECODED not in text else ()
        length, text = twin(texts, tokens, stop_strings)
        rounds = [len(some) for some in rounds_of(tokens[1:length], rng)]
        request = Sequence(0, [5], SamplingParams(), frozenset(), generated=tokens[:1])
        marked, answer = MarkedText(Detokenizer(texts, stop_strings), color=True), ""
        for count in rounds:
            if rng.random() < 0.7:
                answer += marked.new_text(request)
            request.generated += tokens[len(request.generated) :][:count]
            request.rounds.append(count)
        request.finish_reason = "length"
        answer += marked.new_text(request)
        assert answer.replace(GREEN, "").replace(RESET, "") == text
        assert answer == MarkedText(Detokenizer(texts, stop_strings), color=True).new_text(request)
