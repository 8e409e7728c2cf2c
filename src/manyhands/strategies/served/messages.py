"""What chief, servers and workers say to each other: small typed messages; tensors travel behind them as raw frames."""

from __future__ import annotations

import msgspec

from ...core import RunError

MAX_HEADER = 1 << 24
"""Bytes of a message without its tensors: enough for what an optimizer remembers of a hundred thousand of them."""
MAX_FRAME = 1 << 24
"""Bytes of one frame, in which messages and parts of tensors travel; more closes the connection."""


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """Base of all messages: decoding checks every field."""


class Hello(Message, tag=True):
    """A member that wants to speak: a number drawn for this connection."""

    nonce: bytes


class Challenge(Message, tag=True):
    """The listener's own number, and proof that it knows the token."""

    nonce: bytes
    proof: bytes


class Proof(Message, tag=True):
    """The member's proof that it knows the token."""

    proof: bytes


class Welcome(Message, tag=True):
    """The connection may be used."""


class Stranger(Message, tag=True):
    """The connection has not proved that it knows the token."""


class JoinRequest(Message, tag=True):
    """A server or a worker reports to the chief; a server says where it listens."""

    role: str
    number: int
    address: str = ""
    term: int = -1
    """Of what a server holds that comes back after its connection was lost."""


class ServerList(Message, tag=True):
    """Where the servers are. With another term whatever is under way is given up and asked for again."""

    term: int
    servers: list[str]


class Ask(Message, tag=True):
    """A worker wants a part of the work."""

    term: int


class WorkPart(Message, tag=True):
    """A part of the work; the samples' ids follow as a frame."""

    term: int
    ticket: int
    epoch: int
    step: int
    version: int
    """The oldest values that it may be computed with."""
    rates: list[float]
    """Learning rates by parameter group, where the worker's push is an update by itself."""


class Delivered(Message, tag=True):
    """All servers have a part's gradient."""

    term: int
    ticket: int
    total: float
    count: float
    weight: float
    """What the part's gradient is multiplied with before it is divided by the counts of all parts."""
    staleness: int
    """How many updates the values did not know of that it was computed with."""
    skipped: bool = False


class EndOfWork(Message, tag=True):
    """The work is done."""


class Attach(Message, tag=True):
    """Shared memory of a worker, where it is on the same machine: a process, a descriptor, and what stands in it."""

    worker: int
    pid: int
    fd: int
    size: int
    cookie: bytes


class Attached(Message, tag=True):
    """Whether the server could open it."""

    is_shared: bool


class Push(Message, tag=True):
    """A part's gradient; frames or shared memory hold the dense ones, then come ids and rows of every table."""

    term: int
    ticket: int
    version: int
    """That the values had which it was computed with."""
    is_shared: bool
    unused: list[int]
    """Numbers of parameters without a gradient."""
    scale: float = 1.0
    rates: list[float] = []
    """Learning rates, where the push is an update by itself; empty where the chief closes the step."""


class Pushed(Message, tag=True):
    """The gradient is kept, or applied at once; `staleness` is the number of updates that it did not know of."""

    ticket: int
    staleness: int
    is_new: bool


class Pull(Message, tag=True):
    """Asks for values that are at least of this version."""

    term: int
    version: int
    is_shared: bool


class Values(Message, tag=True):
    """The values of a server's slabs."""

    version: int


class PullRows(Message, tag=True):
    """Asks for rows of a table; their ids follow."""

    term: int
    table: int
    version: int


class RowsReply(Message, tag=True):
    """The rows that were asked for follow."""

    version: int


class Weighed(Message):
    """A ticket of a step: what its gradient is multiplied with, and its share of the step's samples."""

    ticket: int
    scale: float
    share: float


class Close(Message, tag=True):
    """Ends a step: these tickets together are its gradient."""

    term: int
    step: int
    tickets: list[Weighed]
    rates: list[float]
    is_measured: bool
    """Whether the squared norm is wanted before the update is taken."""


class Summed(Message, tag=True):
    """The squared norm of a server's part of a step's gradient."""

    term: int
    step: int
    square: float


class Apply(Message, tag=True):
    """Takes the update of a step whose norm was asked for, shortened by a factor; 0 leaves it out."""

    term: int
    step: int
    scale: float


class Gone(Message, tag=True):
    """A worker that will not come back."""

    worker: int


class Save(Message, tag=True):
    """Asks for everything that a server holds."""


class Shaped(Message, tag=True):
    """A slot of an optimizer that is no single number: a frame holds it."""

    shape: list[int]
    dtype: str


Slots = dict[str, float | Shaped]


class ServerState(Message, tag=True):
    """What a server holds: its values, and the optimizer's slots by piece; tables follow as ids, rows and slots."""

    version: int
    slots: list[Slots]
    """By piece, by name."""
    tables: list[list[str]]
    """By table: the number of its updates, and the names of its slots."""
    applied: int
    """Gradients since the last load."""
    wire: int
    """Bytes from workers and to them."""


class Load(Message, tag=True):
    """Makes a server hold this from now on; its frames are those of `ServerState`."""

    term: int
    version: int
    slots: list[Slots]
    tables: list[list[str]]
    ledger: list[int] = msgspec.field(default_factory=lambda: [0])
    """What was applied: all tickets below the first number, and the others."""


class Loaded(Message, tag=True):
    """A server holds what it was given."""

    term: int


class Renew(Message, tag=True):
    """Another term with what a server holds; a follower that hears it is a server from now on."""

    term: int


class Lead(Message, tag=True):
    """Where a server's follower listens; it is to be filled. Without an address there is none any more."""

    address: str


class Filled(Message, tag=True):
    """The follower at this address has all that its server acknowledges."""

    address: str


class Follow(Message, tag=True):
    """What a server takes, for its follower to take too; frames as they came."""

    message: Push | Close | Apply | Load


class Followed(Message, tag=True):
    """The follower has taken the next thing."""


class Unreached(Message, tag=True):
    """A member does not get through to a server, or a server to its follower, of the same number."""

    number: int
    address: str = ""


class Beat(Message, tag=True):
    """A question whether somebody is there, and the answer."""


AnyMessage = (
    Hello
    | Challenge
    | Proof
    | Welcome
    | Stranger
    | JoinRequest
    | ServerList
    | Ask
    | WorkPart
    | Delivered
    | EndOfWork
    | Attach
    | Attached
    | Push
    | Pushed
    | Pull
    | Values
    | PullRows
    | RowsReply
    | Close
    | Summed
    | Apply
    | Save
    | ServerState
    | Load
    | Loaded
    | Renew
    | Lead
    | Filled
    | Follow
    | Followed
    | Unreached
    | Beat
    | Gone
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """A message as bytes; one that is too long for the other end is an error here."""
    data = _encoder.encode(message)
    if len(data) > MAX_HEADER:
        raise RunError(
            f"a {type(message).__name__} of {len(data)} bytes is too long, {MAX_HEADER} are allowed; use more servers"
        )
    return data


def decode(data: bytes | memoryview) -> AnyMessage:
    """The message of these bytes; `msgspec.DecodeError` where they are none."""
    if len(data) > MAX_HEADER:
        raise msgspec.DecodeError(f"a message has at most {MAX_HEADER} bytes, but got {len(data)}")
    try:
        message: AnyMessage = _decoder.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:
        # msgspec lets errors of texts and of depth through as they are.
        raise msgspec.DecodeError(f"not a message: {error}") from None
    return message
