"""The feed: global order, sharing out over replicas, reading ahead, and the cursor that resumes it."""

from .arrays import is_arrays
from .batch import Batch, Cursor, first_dim, map_leaves, split, tensors, to_device
from .bucketed import Bucketed, bucketed
from .digest import data_digest
from .feed import Feed
from .fields import Fields
from .files import Files, files
from .order import Ids, Order
from .orders import Orders
from .prefetch import Prefetcher
from .resident import Resident, ResidentBatch, in_memory, lies_in_memory
from .shares import part_of
from .source import IndexedSource, Source, Window, check_source
from .sources import as_source

__all__ = [
    "Feed",
    "Batch",
    "Resident",
    "ResidentBatch",
    "in_memory",
    "lies_in_memory",
    "Fields",
    "Files",
    "files",
    "Bucketed",
    "bucketed",
    "Cursor",
    "Source",
    "IndexedSource",
    "Window",
    "Ids",
    "part_of",
    "as_source",
    "is_arrays",
    "check_source",
    "data_digest",
    "Order",
    "Orders",
    "Prefetcher",
    "first_dim",
    "map_leaves",
    "split",
    "tensors",
    "to_device",
]
