from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerificationMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERIFICATION_MODE_UNSPECIFIED: _ClassVar[VerificationMode]
    VERIFICATION_MODE_GREEDY: _ClassVar[VerificationMode]
    VERIFICATION_MODE_COUPLED: _ClassVar[VerificationMode]
    VERIFICATION_MODE_REJECTION: _ClassVar[VerificationMode]
    VERIFICATION_MODE_BLOCK: _ClassVar[VerificationMode]

class OpenStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OPEN_STATUS_UNSPECIFIED: _ClassVar[OpenStatus]
    OPEN_STATUS_OK: _ClassVar[OpenStatus]
    OPEN_STATUS_BUSY: _ClassVar[OpenStatus]
    OPEN_STATUS_UNSUPPORTED: _ClassVar[OpenStatus]

class CloseReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CLOSE_REASON_UNSPECIFIED: _ClassVar[CloseReason]
    CLOSE_REASON_FINISHED: _ClassVar[CloseReason]
    CLOSE_REASON_ABORTED: _ClassVar[CloseReason]
    CLOSE_REASON_REPLACED: _ClassVar[CloseReason]
    CLOSE_REASON_UNKNOWN: _ClassVar[CloseReason]
    CLOSE_REASON_PROTOCOL: _ClassVar[CloseReason]
VERIFICATION_MODE_UNSPECIFIED: VerificationMode
VERIFICATION_MODE_GREEDY: VerificationMode
VERIFICATION_MODE_COUPLED: VerificationMode
VERIFICATION_MODE_REJECTION: VerificationMode
VERIFICATION_MODE_BLOCK: VerificationMode
OPEN_STATUS_UNSPECIFIED: OpenStatus
OPEN_STATUS_OK: OpenStatus
OPEN_STATUS_BUSY: OpenStatus
OPEN_STATUS_UNSUPPORTED: OpenStatus
CLOSE_REASON_UNSPECIFIED: CloseReason
CLOSE_REASON_FINISHED: CloseReason
CLOSE_REASON_ABORTED: CloseReason
CLOSE_REASON_REPLACED: CloseReason
CLOSE_REASON_UNKNOWN: CloseReason
CLOSE_REASON_PROTOCOL: CloseReason

class SpeculateRequest(_message.Message):
    __slots__ = ("crc32", "body")
    CRC32_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    crc32: int
    body: bytes
    def __init__(self, crc32: _Optional[int] = ..., body: _Optional[bytes] = ...) -> None: ...

class SpeculateResponse(_message.Message):
    __slots__ = ("crc32", "body")
    CRC32_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    crc32: int
    body: bytes
    def __init__(self, crc32: _Optional[int] = ..., body: _Optional[bytes] = ...) -> None: ...

class DraftFrame(_message.Message):
    __slots__ = ("hello", "opened", "draft_tokens", "nack", "close_session", "ping", "pong", "drain", "bye")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NACK_FIELD_NUMBER: _ClassVar[int]
    CLOSE_SESSION_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    BYE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    opened: OpenedBatch
    draft_tokens: DraftTokensBatch
    nack: NackBatch
    close_session: CloseSessionBatch
    ping: Ping
    pong: Pong
    drain: Drain
    bye: Bye
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., opened: _Optional[_Union[OpenedBatch, _Mapping]] = ..., draft_tokens: _Optional[_Union[DraftTokensBatch, _Mapping]] = ..., nack: _Optional[_Union[NackBatch, _Mapping]] = ..., close_session: _Optional[_Union[CloseSessionBatch, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., bye: _Optional[_Union[Bye, _Mapping]] = ...) -> None: ...

class TargetFrame(_message.Message):
    __slots__ = ("welcome", "open_session", "verdict", "nack", "close_session", "ping", "pong", "drain", "bye")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    OPEN_SESSION_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    NACK_FIELD_NUMBER: _ClassVar[int]
    CLOSE_SESSION_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    BYE_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    open_session: OpenSessionBatch
    verdict: VerdictBatch
    nack: NackBatch
    close_session: CloseSessionBatch
    ping: Ping
    pong: Pong
    drain: Drain
    bye: Bye
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., open_session: _Optional[_Union[OpenSessionBatch, _Mapping]] = ..., verdict: _Optional[_Union[VerdictBatch, _Mapping]] = ..., nack: _Optional[_Union[NackBatch, _Mapping]] = ..., close_session: _Optional[_Union[CloseSessionBatch, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., bye: _Optional[_Union[Bye, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "boot_id", "replica_id", "model_id", "vocab_size", "tokenizer_hash", "max_model_len", "max_sessions", "modes")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MODES_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    boot_id: str
    replica_id: str
    model_id: str
    vocab_size: int
    tokenizer_hash: str
    max_model_len: int
    max_sessions: int
    modes: _containers.RepeatedScalarFieldContainer[VerificationMode]
    def __init__(self, protocol_version: _Optional[int] = ..., boot_id: _Optional[str] = ..., replica_id: _Optional[str] = ..., model_id: _Optional[str] = ..., vocab_size: _Optional[int] = ..., tokenizer_hash: _Optional[str] = ..., max_model_len: _Optional[int] = ..., max_sessions: _Optional[int] = ..., modes: _Optional[_Iterable[_Union[VerificationMode, str]]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_version", "boot_id", "replica_id", "model_id", "vocab_size", "tokenizer_hash", "unix_offset_us")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    UNIX_OFFSET_US_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    boot_id: str
    replica_id: str
    model_id: str
    vocab_size: int
    tokenizer_hash: str
    unix_offset_us: int
    def __init__(self, protocol_version: _Optional[int] = ..., boot_id: _Optional[str] = ..., replica_id: _Optional[str] = ..., model_id: _Optional[str] = ..., vocab_size: _Optional[int] = ..., tokenizer_hash: _Optional[str] = ..., unix_offset_us: _Optional[int] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "seed", "choice", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias_token_ids", "logit_biases", "min_tokens", "stop_token_ids", "grammar")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIASES_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    seed: int
    choice: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logit_biases: _containers.RepeatedScalarFieldContainer[float]
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    grammar: str
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., choice: _Optional[int] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias_token_ids: _Optional[_Iterable[int]] = ..., logit_biases: _Optional[_Iterable[float]] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., grammar: _Optional[str] = ...) -> None: ...

class OpenSession(_message.Message):
    __slots__ = ("session_id", "epoch", "prompt_len", "token_ids", "sampling", "mode", "limit_position", "cache_salt", "fan_out", "trace_context")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_POSITION_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    FAN_OUT_FIELD_NUMBER: _ClassVar[int]
    TRACE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    epoch: int
    prompt_len: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    mode: VerificationMode
    limit_position: int
    cache_salt: int
    fan_out: int
    trace_context: bytes
    def __init__(self, session_id: _Optional[int] = ..., epoch: _Optional[int] = ..., prompt_len: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., mode: _Optional[_Union[VerificationMode, str]] = ..., limit_position: _Optional[int] = ..., cache_salt: _Optional[int] = ..., fan_out: _Optional[int] = ..., trace_context: _Optional[bytes] = ...) -> None: ...

class OpenSessionBatch(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[OpenSession]
    def __init__(self, items: _Optional[_Iterable[_Union[OpenSession, _Mapping]]] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("session_id", "epoch", "status")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    epoch: int
    status: OpenStatus
    def __init__(self, session_id: _Optional[int] = ..., epoch: _Optional[int] = ..., status: _Optional[_Union[OpenStatus, str]] = ...) -> None: ...

class OpenedBatch(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Opened]
    def __init__(self, items: _Optional[_Iterable[_Union[Opened, _Mapping]]] = ...) -> None: ...

class DraftDistribution(_message.Message):
    __slots__ = ("token_ids", "weights")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    weights: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., weights: _Optional[_Iterable[int]] = ...) -> None: ...

class DraftTokens(_message.Message):
    __slots__ = ("session_id", "epoch", "start", "context_hash", "token_ids", "last_round", "draft_us", "sent_us", "distributions", "is_branch", "began_us", "received_us")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LAST_ROUND_FIELD_NUMBER: _ClassVar[int]
    DRAFT_US_FIELD_NUMBER: _ClassVar[int]
    SENT_US_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    IS_BRANCH_FIELD_NUMBER: _ClassVar[int]
    BEGAN_US_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_US_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    epoch: int
    start: int
    context_hash: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    last_round: int
    draft_us: int
    sent_us: int
    distributions: _containers.RepeatedCompositeFieldContainer[DraftDistribution]
    is_branch: bool
    began_us: int
    received_us: int
    def __init__(self, session_id: _Optional[int] = ..., epoch: _Optional[int] = ..., start: _Optional[int] = ..., context_hash: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., last_round: _Optional[int] = ..., draft_us: _Optional[int] = ..., sent_us: _Optional[int] = ..., distributions: _Optional[_Iterable[_Union[DraftDistribution, _Mapping]]] = ..., is_branch: _Optional[bool] = ..., began_us: _Optional[int] = ..., received_us: _Optional[int] = ...) -> None: ...

class DraftTokensBatch(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[DraftTokens]
    def __init__(self, items: _Optional[_Iterable[_Union[DraftTokens, _Mapping]]] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("session_id", "epoch", "start", "token_ids", "num_accepted_tokens", "limit_position", "round", "trace_context", "queue_us", "verify_us", "has_rejection", "fan_out", "sent_us")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_POSITION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TRACE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    VERIFY_US_FIELD_NUMBER: _ClassVar[int]
    HAS_REJECTION_FIELD_NUMBER: _ClassVar[int]
    FAN_OUT_FIELD_NUMBER: _ClassVar[int]
    SENT_US_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    epoch: int
    start: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_accepted_tokens: int
    limit_position: int
    round: int
    trace_context: bytes
    queue_us: int
    verify_us: int
    has_rejection: bool
    fan_out: int
    sent_us: int
    def __init__(self, session_id: _Optional[int] = ..., epoch: _Optional[int] = ..., start: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_accepted_tokens: _Optional[int] = ..., limit_position: _Optional[int] = ..., round: _Optional[int] = ..., trace_context: _Optional[bytes] = ..., queue_us: _Optional[int] = ..., verify_us: _Optional[int] = ..., has_rejection: _Optional[bool] = ..., fan_out: _Optional[int] = ..., sent_us: _Optional[int] = ...) -> None: ...

class VerdictBatch(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Verdict]
    def __init__(self, items: _Optional[_Iterable[_Union[Verdict, _Mapping]]] = ...) -> None: ...

class Nack(_message.Message):
    __slots__ = ("session_id", "epoch", "have_len")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HAVE_LEN_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    epoch: int
    have_len: int
    def __init__(self, session_id: _Optional[int] = ..., epoch: _Optional[int] = ..., have_len: _Optional[int] = ...) -> None: ...

class NackBatch(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Nack]
    def __init__(self, items: _Optional[_Iterable[_Union[Nack, _Mapping]]] = ...) -> None: ...

class CloseSession(_message.Message):
    __slots__ = ("session_id", "epoch", "reason")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    epoch: int
    reason: CloseReason
    def __init__(self, session_id: _Optional[int] = ..., epoch: _Optional[int] = ..., reason: _Optional[_Union[CloseReason, str]] = ...) -> None: ...

class CloseSessionBatch(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[CloseSession]
    def __init__(self, items: _Optional[_Iterable[_Union[CloseSession, _Mapping]]] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("sent_us", "num_sessions", "queue_len")
    SENT_US_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_LEN_FIELD_NUMBER: _ClassVar[int]
    sent_us: int
    num_sessions: int
    queue_len: int
    def __init__(self, sent_us: _Optional[int] = ..., num_sessions: _Optional[int] = ..., queue_len: _Optional[int] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("ping_sent_us", "received_us")
    PING_SENT_US_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_US_FIELD_NUMBER: _ClassVar[int]
    ping_sent_us: int
    received_us: int
    def __init__(self, ping_sent_us: _Optional[int] = ..., received_us: _Optional[int] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Bye(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...
