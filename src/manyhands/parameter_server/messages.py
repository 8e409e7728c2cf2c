"""Messages between coordinator, parameter servers and workers: small typed structs, with tensors as raw frames."""

from __future__ import annotations

import msgspec

from ..core import RunError

MAX_HEADER = 1 << 24
"""Maximum bytes of a message without tensors: enough for the optimizer slots of a hundred thousand tensors."""
MAX_FRAME = 1 << 24
"""Maximum bytes of one frame, for messages and for chunks of tensors; a larger frame closes the connection."""


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """Base of all messages; decoding validates every field."""


class Hello(Message, tag=True):
    """A member's first message: a nonce for this connection."""

    nonce: bytes


class Challenge(Message, tag=True):
    """The listener's nonce, and its proof that it knows the token."""

    nonce: bytes
    proof: bytes


class Proof(Message, tag=True):
    """The member's proof that it knows the token."""

    proof: bytes


class Welcome(Message, tag=True):
    """Accept a connection whose member has proved that it knows the token."""


class Unauthenticated(Message, tag=True):
    """Reject a message on a connection whose member has not proved that it knows the token."""


class JoinRequest(Message, tag=True):
    """Register a server or a worker with the coordinator; a server includes its listening address."""

    role: str
    number: int
    address: str = ""
    term: int = -1
    """The term of a server's values, if it reconnects after its connection was lost."""


class ServerList(Message, tag=True):
    """The addresses of the servers. With a new term, requests in flight are dropped and repeated."""

    term: int
    servers: list[str]


class WorkRequest(Message, tag=True):
    """Request a ticket (the samples of a part of a step); sent by a worker."""

    term: int


class WorkPart(Message, tag=True):
    """A ticket that a worker must compute: its part of a step. The ids of the samples follow as a frame."""

    term: int
    ticket: int
    epoch: int
    step: int
    version: int
    """The oldest version of the servers' values with which the worker may compute the ticket."""
    rates: list[float]
    """Learning rates by parameter group if the worker's push is a separate update; otherwise empty."""


class Delivered(Message, tag=True):
    """Report that all servers have the gradient of a ticket, with the sum of its losses and the divisor of the mean."""

    term: int
    ticket: int
    total: float
    count: float
    weight: float
    """Factor of the ticket's gradient, before the sum over the tickets of a step is divided by their counts."""
    staleness: int
    """Number of updates that were missing in the values with which the gradient was computed."""
    skipped: bool = False


class EndOfWork(Message, tag=True):
    """Notify a member that the job has ended, so that it exits."""


class Attach(Message, tag=True):
    """Offer a worker's memory to a server on the same host: process, file descriptor, size, and bytes at its start."""

    worker: int
    pid: int
    fd: int
    size: int
    cookie: bytes


class Attached(Message, tag=True):
    """Report whether the server could open the shared memory."""

    is_shared: bool


class Push(Message, tag=True):
    """The gradients of a ticket; its tensors are dense ones, then ids and gradients of the rows of each table."""

    term: int
    ticket: int
    version: int
    """The version of the values with which the gradient was computed."""
    is_shared: bool
    unused: list[int]
    """Indexes of the trained parameters without a gradient."""
    scale: float = 1.0
    rates: list[float] = []
    """Learning rates if the push is a separate update; empty if the coordinator closes the step."""


class Pushed(Message, tag=True):
    """Report that a gradient was stored or applied; its values lacked `staleness` updates."""

    ticket: int
    staleness: int
    is_new: bool


class Pull(Message, tag=True):
    """Request a server's values; the server answers when they have at least this version."""

    term: int
    version: int
    is_shared: bool


class Values(Message, tag=True):
    """Answer to `Pull`; the values follow as frames, or are in shared memory."""

    version: int


class PullRows(Message, tag=True):
    """Request rows of an embedding table; their ids follow as a frame."""

    term: int
    table: int
    version: int


class RowsReply(Message, tag=True):
    """Answer to `PullRows`; the rows follow as a frame."""

    version: int


class TicketWeight(Message):
    """The weight of a ticket (a worker's part of a step): the factor of its gradient, and its share of the samples."""

    ticket: int
    scale: float
    share: float


class Close(Message, tag=True):
    """Close a step, whose gradient is the sum over these tickets."""

    term: int
    step: int
    tickets: list[TicketWeight]
    rates: list[float]
    is_measured: bool
    """Whether the server must answer with the squared norm of its sum, and apply the update on `Apply` only."""


class Summed(Message, tag=True):
    """The squared norm of a server's part of a step's gradient."""

    term: int
    step: int
    square: float


class Apply(Message, tag=True):
    """Apply the update of a step whose norm was requested, scaled by a factor; 0 skips the update."""

    term: int
    step: int
    scale: float


class WorkerGone(Message, tag=True):
    """Report that a worker has failed, so that the server frees the memory that it shares with the worker."""

    worker: int


class Save(Message, tag=True):
    """Request the whole state of a server."""


class SlotTensor(Message, tag=True):
    """An optimizer slot that is not a scalar; its values are in a frame."""

    shape: list[int]
    dtype: str


Slots = dict[str, float | SlotTensor]


class ServerState(Message, tag=True):
    """Answer to `Save`: the server's values and optimizer slots as frames, then ids, rows and slots of each table."""

    version: int
    slots: list[Slots]
    """For each trained piece of a tensor: its optimizer slots by name."""
    tables: list[list[str]]
    """For each embedding table: the number of its updates, and the names of its slots."""
    applied: int
    """Number of gradients applied since the last load."""
    wire: int
    """Number of bytes exchanged with workers."""


class Load(Message, tag=True):
    """Replace a server's state; the frames are those of `ServerState`."""

    term: int
    version: int
    slots: list[Slots]
    tables: list[list[str]]
    applied: list[int] = msgspec.field(default_factory=lambda: [0])
    """The tickets that were applied: all numbers below the first entry, and the other entries themselves."""


class Loaded(Message, tag=True):
    """Report that a server has loaded its state."""

    term: int


class NewTerm(Message, tag=True):
    """Start a new term with the server's current state; a follower that receives it becomes the server."""

    term: int


class SetFollower(Message, tag=True):
    """The address of a follower to which the server must send its state; empty if it has no follower any more."""

    address: str


class FollowerFilled(Message, tag=True):
    """Report that the follower at this address has everything that its server acknowledges."""

    address: str


class ReplicateMessage(Message, tag=True):
    """Replicate a message that a server received to its follower, with the same frames."""

    message: Push | Close | Apply | Load


class MessageReplicated(Message, tag=True):
    """Acknowledge the oldest replicated message that the follower has not acknowledged yet."""


class Unreachable(Message, tag=True):
    """Report that a worker cannot reach the server with this number, or that this server cannot reach its follower."""

    number: int
    address: str = ""


class Heartbeat(Message, tag=True):
    """Request a sign of life from a server or follower, and the answer to it."""


AnyMessage = (
    Hello
    | Challenge
    | Proof
    | Welcome
    | Unauthenticated
    | JoinRequest
    | ServerList
    | WorkRequest
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
    | NewTerm
    | SetFollower
    | FollowerFilled
    | ReplicateMessage
    | MessageReplicated
    | Unreachable
    | Heartbeat
    | WorkerGone
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """Return a message as bytes; raise RunError if it is longer than the receiver accepts."""
    data = _encoder.encode(message)
    if len(data) > MAX_HEADER:
        raise RunError(
            f"the message {type(message).__name__} must have at most {MAX_HEADER} bytes, but got {len(data)}; "
            "use more servers"
        )
    return data


def decode(data: bytes | memoryview) -> AnyMessage:
    """Return the message in `data`; raise `msgspec.DecodeError` if the bytes are not a valid message."""
    if len(data) > MAX_HEADER:
        raise msgspec.DecodeError(f"a message has at most {MAX_HEADER} bytes, but got {len(data)}")
    try:
        message: AnyMessage = _decoder.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:
        # msgspec does not convert errors about text encoding and nesting depth.
        raise msgspec.DecodeError(f"not a message: {error}") from None
    return message
