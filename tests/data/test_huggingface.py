"""Hugging Face datasets, with the real package: map style and iterable, with formats, transforms and images."""

from __future__ import annotations

import datasets
import numpy as np
import PIL.Image
import pytest
import torch
from torch.utils.data import DataLoader

import manyhands as mh
from manyhands.core import DataError
from manyhands.data import Cursor, Feed, as_source

SIZE = 23
IDS = np.array([7, 0, 3])


@pytest.fixture
def data():
    return datasets.Dataset.from_dict(
        {
            "input_ids": [list(range(i % 4 + 1)) for i in range(SIZE)],
            "label": list(range(SIZE)),
            "weight": [i / 4 for i in range(SIZE)],
            "text": [f"row {i}" for i in range(SIZE)],
        }
    )


def labels(data, cursor=Cursor(), **settings):  # noqa: B008 (frozen)
    found = []
    for batch in Feed(as_source(data), **{"batch_size": 5} | settings).epoch(cursor):
        found += batch.data["label"].tolist()
    return found


@pytest.mark.parametrize("form", [None, "torch", "numpy"])
def test_columns_become_tensors(data, form):
    batch = as_source(data.with_format(form)).fetch(IDS)
    assert batch["label"].tolist() == IDS.tolist()
    assert (batch["label"].dtype, batch["weight"].dtype) == (torch.int64, torch.float32)
    assert batch["text"] == ["row 7", "row 0", "row 3"]
    assert batch["input_ids"].tolist() == [[0, 1, 2, 3], [0, 0, 0, 0], [0, 1, 2, 3]]
    assert batch["input_ids"].dtype == torch.int64
    assert batch.lengths("input_ids").tolist() == [4, 1, 4]


def test_format_columns_select_the_batch_columns(data):
    batch = as_source(data.with_format("torch", columns=["label"])).fetch(IDS)
    assert list(batch) == ["label"]


def test_filtered_and_selected_views_are_read(data):
    source = as_source(data.filter(lambda row: row["label"] % 2 == 1).select(range(4)))
    assert source.fetch(np.arange(4))["label"].tolist() == [1, 3, 5, 7]


def test_shuffle_order_equals_that_of_a_list(data):
    found = labels(data, seed=3)
    assert found == labels(list(data.select_columns("label")), seed=3)
    assert sorted(found) == list(range(SIZE))
    assert labels(data, Cursor(0, 10), seed=3) == found[10:]


def test_random_transform_is_reproducible_with_workers_and_after_resume(data):
    def transform(rows):
        return {"label": [row + torch.rand(()).item() for row in rows["label"]]}

    noisy = data.with_transform(transform)
    whole = labels(noisy)
    assert whole != [int(label) for label in whole]
    assert labels(noisy, workers=2) == whole
    assert labels(noisy, Cursor(0, 10)) == whole[10:]


def test_collate_receives_a_list_of_rows(data):
    source = as_source(data, collate=lambda rows: [row["text"] for row in rows])
    assert source.fetch(IDS) == ["row 7", "row 0", "row 3"]


def test_data_loader_over_a_dataset_is_accepted(data):
    source = as_source(DataLoader(data.with_format("torch"), batch_size=4))
    assert (source.batch_size, source.shuffle) == (4, False)
    assert source.fetch(IDS)["label"].tolist() == IDS.tolist()


def test_images_are_decoded():
    images = [PIL.Image.fromarray(np.full((4, 4, 3), i, np.uint8)) for i in range(6)]
    data = datasets.Dataset.from_dict({"image": images}, datasets.Features({"image": datasets.Image()}))
    for form in ("numpy", None):
        assert as_source(data.with_format(form)).fetch(np.array([5, 2]))["image"][:, 0, 0, 0].tolist() == [5, 2]


def test_bucketing_by_a_column_groups_similar_lengths(data):
    for shown in (data, data.with_transform(lambda rows: rows)):
        source = as_source(mh.data.bucketed(shown, 4, length="input_ids"))
        lengths = [batch.data["input_ids"].shape[1] for batch in Feed(source, batch_size=4).epoch(Cursor())]
        assert lengths.count(4) <= 2
        assert sorted(labels(mh.data.bucketed(shown, 5, length="input_ids"))) == list(range(SIZE))


def test_dataset_dict_is_rejected_with_a_hint_to_pass_one_split(data):
    text = r"one dataset, but got DatasetDict of test, train. Pass data\['train'\]"
    with pytest.raises(DataError, match=text):
        as_source(datasets.DatasetDict(test=data, train=data))


def test_missing_value_error_names_column_and_sample():
    data = datasets.Dataset.from_dict({"label": [1, 2, None, 4]})
    with pytest.raises(
        DataError, match=r"sample of Dataset must be readable.*the column 'label' has no value at sample 2"
    ):
        as_source(data).fetch(np.array([0, 2]))
    data = datasets.Dataset.from_dict({"tokens": [[1, 2, 3], [4, None], [5]]})
    with pytest.raises(DataError, match=r"the column 'tokens' has no value at sample 1"):
        as_source(data).fetch(np.array([0, 1]))


class TestIterable:
    def test_iterable_dataset_is_read_in_its_order(self, data):
        assert labels(data.to_iterable_dataset()) == list(range(SIZE))
        assert labels(data.to_iterable_dataset(num_shards=3), workers=2) == list(range(SIZE))

    def test_iterable_shuffle_differs_between_epochs_and_resumes(self, data):
        stream = data.to_iterable_dataset(num_shards=3).shuffle(seed=1, buffer_size=8)
        first, again, other = labels(stream), labels(stream), labels(stream, Cursor(1))
        assert first == again != other
        assert sorted(first) == sorted(other) == list(range(SIZE))
        assert labels(stream, Cursor(1, 10)) == other[10:]

    def test_columns_of_an_iterable_dataset_are_padded(self, data):
        batch = next(Feed(as_source(data.to_iterable_dataset()), batch_size=3).epoch(Cursor())).data
        assert batch["input_ids"].tolist() == [[0, 0, 0], [0, 1, 0], [0, 1, 2]]
        assert batch.lengths("input_ids").tolist() == [1, 2, 3]


@pytest.mark.parametrize("iterable", [False, True])
def test_fit_on_two_replicas_has_the_same_losses_as_on_one(data, iterable, tmp_path):
    def loss(model, batch):
        return (model(batch["weight"].unsqueeze(1)).squeeze(1) - batch["label"] / SIZE).square().mean()

    task = mh.Task(
        model=lambda: torch.nn.Linear(1, 1),
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        data=data.to_iterable_dataset() if iterable else data,
        batch_size=5,
    )
    runs = [
        mh.fit(
            task, strategy, on=on, epochs=2, folder=tmp_path, name=on[-1], options=mh.options.Display(progress=False)
        )
        for strategy, on in ((mh.Single(), "cpu"), (mh.Mirrored(2), "cpu*2"))
    ]
    assert runs[0].num_steps == 10
    torch.testing.assert_close(torch.tensor(runs[0].losses), torch.tensor(runs[1].losses))
