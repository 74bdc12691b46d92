import builtins

import pytest
import torch

from pp_recipe import text


def test_builtin_text_is_english_and_long():
    manual = text.builtin_text()
    assert len(manual.encode()) > 200_000
    assert " the " in manual


def test_docstrings_serve_where_the_manual_is_missing(monkeypatch):
    real_import = builtins.__import__

    def without_pydoc_data(name, *args, **kwargs):
        if name.startswith("pydoc_data"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_pydoc_data)
    assert len(text.builtin_text().encode()) > 200_000


def test_builtin_text_is_the_same_every_time():
    assert text.builtin_text() == text.builtin_text()


def test_bytes_are_tokens():
    words = "A line.\n\tA café, 数, \x00 and \u00ad.\n  two  spaces"
    tokenizer = text.byte_tokenizer()
    ids = tokenizer(words, add_special_tokens=False)["input_ids"]
    assert bytes(ids) == words.encode()
    assert tokenizer.decode(ids) == words
    assert len(tokenizer) == 256


def test_batches_are_shifted_by_one_and_repeat_by_seed():
    tokens = torch.arange(1000)
    input_ids, labels = text.draw_batch(tokens, batch_size=4, seq_len=16, seed=1, step=7)
    assert input_ids.shape == labels.shape == (4, 16)
    assert torch.equal(labels, input_ids + 1)
    again, _ = text.draw_batch(tokens, batch_size=4, seq_len=16, seed=1, step=7)
    assert torch.equal(again, input_ids)
    for seed, step in ((1, 8), (2, 7)):
        other, _ = text.draw_batch(tokens, batch_size=4, seq_len=16, seed=seed, step=step)
        assert not torch.equal(other, input_ids)


def test_the_shortest_text_gives_its_only_passage():
    tokens = torch.arange(17)
    input_ids, labels = text.draw_batch(tokens, batch_size=3, seq_len=16, seed=0, step=0)
    assert input_ids.tolist() == [list(range(16))] * 3
    assert labels[0, -1] == 16


def test_a_file_that_is_no_text_is_told(tmp_path):
    binary = tmp_path / "binary"
    binary.write_bytes(b"ab\xff\xfe")
    with pytest.raises(text.TextError, match=r"is no UTF-8 text \(byte 2\)"):
        text.read_text(str(binary))
    with pytest.raises(text.TextError, match="cannot be read: No such file or directory"):
        text.read_text(str(tmp_path / "missing"))
