"""Labelled images of any size, from TFRecord shards or folders of files, decoded to one size by a pool of threads.

In training, a sample is a random window drawn from its place in the training; otherwise it is the middle of the image.
The bytes do not depend on the number of threads. Mirroring and normalising are done on the device. Called by workloads
that learn from photographs; `stores.py` reads the files.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from podium.data.gather_pool import GatherPool
from podium.data.images.crops import ImageError, centre_window, decode_crop, image_size, random_windows
from podium.data.images.stores import Cache, EncodedSample, Split, Store, cached_fetch, open_folders, open_shards
from podium.data.source import Arrays, Field
from podium.errors import UserError
from podium.machine import counter_rng


@dataclass(frozen=True)
class RandomCrops:
    """How windows are drawn in training: see `random_windows`."""

    seed: int = 0
    #: None: no windows are drawn, and training sees the middle as validation does
    area: tuple[float, float] | None = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    #: how much of one of the image's bounding boxes a window must cover, if it has any; 0: boxes are ignored
    min_covered: float = 0.1


class Options(TypedDict, total=False):
    """Options of `ImageSource`, apart from the store and the size."""

    resize: int | None
    crops: RandomCrops | None
    cache: Cache
    threads: int | None
    max_samples: int | None


def tfrecord_source(
    folder: Path,
    split: Split,
    size: int,
    *,
    valid_folder: Path | None = None,
    first_label: int = 1,
    num_classes: int | None = None,
    **options: Unpack[Options],
) -> "ImageSource":
    """Open the shards `train-00000-of-01024`, … or `validation-00000-of-00128`, … of a folder, in their order.

    Labels are delivered minus `first_label`: the published shards of ImageNet count from 1. `valid_folder`: where those
    of validation are, if elsewhere.
    """
    place = folder if split == "train" or valid_folder is None else valid_folder
    return ImageSource(open_shards(place, split, first_label, num_classes), size, **options)


def folder_source(
    folder: Path,
    split: Split,
    size: int,
    *,
    valid_folder: Path | None = None,
    num_classes: int | None = None,
    **options: Unpack[Options],
) -> "ImageSource":
    """Open the images of `train/<class>/…` or `val/<class>/…` of a folder, sorted by class and name.

    Classes are numbered in the sorted order of the training folder, or of this split if there is none. `valid_folder`:
    the folder of classes for validation, if it is elsewhere.
    """
    store, classes = open_folders(folder, split, num_classes, valid_folder)
    return ImageSource(store, size, class_names=classes, **options)


class ImageSource:
    """Samples of a store: image (size, size, 3) of uint8 and label.

    Outside of training, the shorter side of an image is resized to `resize` (by default 8/7 of `size`: 256 for 224) and
    the middle is cropped.
    """

    def __init__(
        self,
        store: Store,
        size: int,
        *,
        resize: int | None = None,
        crops: RandomCrops | None = None,
        cache: Cache = "none",
        threads: int | None = None,
        max_samples: int | None = None,
        class_names: tuple[str, ...] | None = None,
    ) -> None:
        self.fields: Mapping[str, Field] = {"image": Field((size, size, 3), np.uint8), "label": Field((), np.int64)}
        #: names of the classes, if the data has them
        self.class_names = class_names
        self._store = store
        self._fetch = cached_fetch(store, cache)
        self._size = size
        self._resize = max(size, round(size * 8 / 7) if resize is None else resize)
        self._crops = crops or RandomCrops()
        self._stream = counter_rng.key("crop", self._crops.seed)
        self._length = len(store) if max_samples is None else min(max_samples, len(store))
        self._pool = GatherPool(threads, "podium-images")

    def __len__(self) -> int:
        return self._length

    def gather(self, samples: NDArray[np.int64], out: Arrays, places: NDArray[np.int64] | None = None) -> None:
        self.begin(samples, out, places)()

    def begin(
        self, samples: NDArray[np.int64], out: Arrays, places: NDArray[np.int64] | None = None
    ) -> Callable[[], None]:
        """Start to gather, as `podium.data.source.BackgroundSource` describes."""
        images, labels = out["image"], out["label"]

        def fill(part: slice) -> None:
            self._fill(samples[part], images[part], labels[part], None if places is None else places[part])

        return self._pool.begin(len(samples), fill)

    def _fill(
        self,
        samples: NDArray[np.int64],
        images: NDArray[np.uint8],
        labels: NDArray[np.int64],
        places: NDArray[np.int64] | None,
    ) -> None:
        encoded, sizes = [], np.empty((len(samples), 2), np.int64)
        row = 0
        try:
            for row, sample in enumerate(samples.tolist()):
                encoded.append(self._store.parse(sample, self._fetch(sample)))
                labels[row] = encoded[row].label
                sizes[row] = image_size(encoded[row].data)
            for row, window in enumerate(self._windows(encoded, sizes, places)):
                decode_crop(encoded[row].data, *window, self._size, images[row])
        except ImageError as error:
            raise UserError(f"{self._store.name(int(samples[row]))} cannot be decoded: {error}") from None

    def _windows(
        self, encoded: list[EncodedSample], sizes: NDArray[np.int64], places: NDArray[np.int64] | None
    ) -> list[tuple[int, int, int, int]]:
        crops = self._crops
        if places is None or crops.area is None:
            return [centre_window(height, width, self._resize, self._size) for height, width in sizes.tolist()]
        boxes = [item.boxes for item in encoded] if crops.min_covered > 0 else None
        heights, widths = sizes.T
        windows = random_windows(
            self._stream, places, heights, widths, crops.area, crops.ratio, boxes, crops.min_covered
        )
        return windows.tolist()
