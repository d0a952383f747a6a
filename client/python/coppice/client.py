"""Generation over gRPC, taken up again where a router went away."""
import dataclasses
import time
from typing import Iterator, List, Optional, Sequence

import grpc

from coppice.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc

_LIMIT = 16 << 20  # of one message, as the services have it
_OPTIONS = [
    ("grpc.max_receive_message_length", _LIMIT),
    ("grpc.max_send_message_length", _LIMIT),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


@dataclasses.dataclass
class Completion:
    """A finished generation."""
    text: str = ""
    token_ids: List[int] = dataclasses.field(default_factory=list)
    request_id: str = ""
    seed: Optional[int] = None
    final: Optional[inference_pb2.Final] = None
    resumes: int = 0


class _Broken(Exception):
    """The stream lost or tore tokens: it is to be resumed from those received."""


class Client:
    """Talks to the first of `routers` (host:port) that answers, and to the next when it goes away."""

    def __init__(self, routers: Sequence[str], attempts_before_first: int = 2, attempts_to_resume: int = 24,
                 first_backoff: float = 0.1, max_backoff: float = 2.0):
        if not routers:
            raise ValueError("no router's address was given")
        self._addresses = list(routers)
        self._channels = [grpc.insecure_channel(address, options=_OPTIONS) for address in routers]
        self._inference = [inference_pb2_grpc.InferenceStub(channel) for channel in self._channels]
        self._cluster = [cluster_pb2_grpc.ClusterStub(channel) for channel in self._channels]
        self._preferred = 0
        self._before_first = attempts_before_first * len(routers)
        self._to_resume = attempts_to_resume
        self._first_backoff, self._max_backoff = first_backoff, max_backoff

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *unused) -> None:
        self.close()

    def stream(self, request: inference_pb2.GenerateRequest,
               completion: Optional[Completion] = None) -> Iterator[inference_pb2.GenerateDelta]:
        """Yields the deltas of a generation: every token once and in order, whatever happens to routers in between.

        `completion`, where given, is filled on the way.  Closing the iterator cancels the request.  Raises
        grpc.RpcError: UNAVAILABLE once no router can be reached, else the router's own error, at once.
        """
        done = completion if completion is not None else Completion()
        router, failures, received = self._preferred, 0, False
        while True:
            call = self._inference[router].Generate(self._attempt(request, done))
            try:
                for delta in call:
                    if not self._accept(delta, done):
                        continue
                    received, failures, self._preferred = True, 0, router
                    yield delta
                if done.final is not None:
                    return
                error: Exception = _Broken("the router ended the stream too early")
            except _Broken as broken:
                error = broken
            except grpc.RpcError as rpc_error:
                if rpc_error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise
                error = rpc_error
            finally:
                call.cancel()
            failures += 1
            if failures >= (self._to_resume if received else self._before_first):
                raise error
            router = (router + 1) % len(self._inference)
            if received:
                done.resumes += 1
            if failures % len(self._inference) == 0:
                rounds = (failures - 1) // len(self._inference)
                time.sleep(min(self._max_backoff, self._first_backoff * 2**rounds))

    def generate(self, request: inference_pb2.GenerateRequest) -> Completion:
        """Runs a generation to its end."""
        done = Completion()
        for _ in self.stream(request, done):
            pass
        return done

    def cancel(self, request_id: str) -> bool:
        return any(stub.Cancel(inference_pb2.CancelRequest(request_id=request_id)).found for stub in self._inference)

    def tokenize(self, text: str) -> List[int]:
        return list(self._unary(self._inference, "Tokenize", inference_pb2.TokenizeRequest(text=text)).ids)

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._unary(self._inference, "Detokenize", inference_pb2.DetokenizeRequest(ids=ids)).text

    def model(self) -> inference_pb2.Model:
        return self._unary(self._inference, "GetModel", inference_pb2.GetModelRequest())

    def state(self) -> cluster_pb2.ClusterState:
        return self._unary(self._cluster, "GetState", cluster_pb2.GetStateRequest())

    @staticmethod
    def _attempt(request, done):
        if done.seed is None:
            return request
        resumed = inference_pb2.GenerateRequest()
        resumed.CopyFrom(request)
        resumed.resume.seed = done.seed
        resumed.resume.token_ids[:] = done.token_ids
        return resumed

    @staticmethod
    def _accept(delta, done) -> bool:
        """Takes a delta in; false for one that is known already.  Text cannot be cut, so half known is broken."""
        have, first = len(done.token_ids), delta.token_offset
        end = first + len(delta.token_ids)
        if first > have or first < have < end:
            raise _Broken("the router skipped tokens")
        if delta.request_id:
            done.request_id = delta.request_id
        if delta.HasField("seed") and done.seed is None:
            done.seed = delta.seed
        if first < have:
            if not delta.HasField("final"):
                return False
            del delta.token_ids[:]
            del delta.logprobs[:]
            delta.text, delta.token_offset = "", have
        done.token_ids.extend(delta.token_ids)
        done.text += delta.text
        if delta.HasField("final"):
            done.final = delta.final
        return True

    def _unary(self, stubs, method, request):
        """Calls each router, the preferred first, until one is there."""
        for i in range(len(stubs)):
            router = (self._preferred + i) % len(stubs)
            try:
                answer = getattr(stubs[router], method)(request, timeout=30)
                self._preferred = router
                return answer
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE or i + 1 == len(stubs):
                    raise
