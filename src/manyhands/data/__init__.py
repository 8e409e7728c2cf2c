"""Data feed: batches in a global sample order, split over the replicas, prefetched, and resumed from a cursor."""

from .batch import Batch, Cursor, copied, first_dim, map_leaves, split, tensors
from .batch_split import part_of, sizes_by
from .bucketed import bucketed
from .device_resident import Resident, ResidentBatch, in_memory, lies_in_memory
from .feed import Feed
from .files import files
from .order import Ids, Order, Orders
from .source import IndexedSource, Source, Window, check_source, is_arrays
from .sources import as_source, data_digest, source_of

__all__ = [
    "Feed",
    "Batch",
    "Resident",
    "ResidentBatch",
    "in_memory",
    "lies_in_memory",
    "files",
    "bucketed",
    "Cursor",
    "Source",
    "IndexedSource",
    "Window",
    "Ids",
    "part_of",
    "sizes_by",
    "as_source",
    "source_of",
    "is_arrays",
    "check_source",
    "data_digest",
    "Order",
    "Orders",
    "copied",
    "first_dim",
    "map_leaves",
    "split",
    "tensors",
]
