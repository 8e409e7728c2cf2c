"""Data feed: global sample order, split over replicas, prefetching, and the cursor from which it resumes."""

from .arrays import is_arrays
from .batch import Batch, Cursor, first_dim, map_leaves, split, tensors, to_device
from .batch_split import part_of
from .bucketed import Bucketed, bucketed
from .device_orders import Orders
from .device_resident import Resident, ResidentBatch, in_memory, lies_in_memory
from .digest import data_digest
from .feed import Feed
from .fields import Fields
from .files import Files, files
from .order import Ids, Order
from .prefetch import Prefetcher
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
