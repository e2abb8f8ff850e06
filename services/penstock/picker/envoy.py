"""What Envoy and the picker tell each other: version 1 of the endpoint picker protocol of the Gateway API Inference
Extension, in messages of Envoy's external processing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from google.protobuf.struct_pb2 import Struct

from penstock.errors import PenstockError
from penstock.v1 import ext_proc_pb2

ENDPOINT = "x-gateway-destination-endpoint"
"""Header, and name in the metadata, of where the request is to go: ip:port, further ones behind commas."""
SERVED = "x-gateway-destination-endpoint-served"
"""Name in the metadata of where it went."""
SUBSET = "x-gateway-destination-endpoint-subset"
"""Name in the metadata of where alone it may go."""
_SPACE = "envoy.lb"
_SUBSET_SPACE = "envoy.lb.subset_hint"
_OVERWRITE = ext_proc_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


def headers(message: ext_proc_pb2.HttpHeaders) -> dict[str, str]:
    """By name, in lower case; of several of one name the first."""
    found: dict[str, str] = {}
    for each in message.headers.headers:
        found.setdefault(each.key.lower(), each.value or each.raw_value.decode(errors="replace"))
    return found


def subset(metadata: ext_proc_pb2.Metadata) -> frozenset[str] | None:
    """Where alone the request may go; None: anywhere."""
    given = _field(metadata, _SUBSET_SPACE, SUBSET)
    if given is None:
        return None
    parts = given.split(",") if isinstance(given, str) else [str(one) for one in given]
    return frozenset(part.strip() for part in parts if part.strip())


def served(metadata: ext_proc_pb2.Metadata) -> str | None:
    """Where the request went, if Envoy says so."""
    given = _field(metadata, _SPACE, SERVED)
    return given if isinstance(given, str) else None


def _field(metadata: ext_proc_pb2.Metadata, space: str, name: str) -> str | Sequence[object] | None:
    if space not in metadata.filter_metadata or name not in metadata.filter_metadata[space].fields:
        return None
    value = metadata.filter_metadata[space].fields[name]
    if value.WhichOneof("kind") == "list_value":
        return [one.string_value for one in value.list_value.values]
    return value.string_value


def go_to(endpoints: Sequence[str]) -> ext_proc_pb2.ProcessingResponse:
    """The answer to the headers of a request. A client's own header of that name is overwritten."""
    where = ",".join(endpoints)
    metadata = Struct()
    metadata.update({_SPACE: {ENDPOINT: where}})
    response = ext_proc_pb2.CommonResponse(header_mutation=_set({ENDPOINT: where}), clear_route_cache=True)
    return ext_proc_pb2.ProcessingResponse(
        request_headers=ext_proc_pb2.HeadersResponse(response=response), dynamic_metadata=metadata
    )


def refuse(error: PenstockError, status: int) -> ext_proc_pb2.ProcessingResponse:
    """The client gets this error, in the shape that gateways give it, and no gateway gets the request."""
    told = {"message": error.message, "type": error.kind, "param": None, "code": error.code}
    sent = {"content-type": "application/json"}
    if error.retry_after is not None:
        sent["retry-after"] = f"{max(1, round(error.retry_after))}"
    immediate = ext_proc_pb2.ImmediateResponse(
        status=ext_proc_pb2.HttpStatus(code=status),
        headers=_set(sent),
        body=json.dumps({"error": told}).encode(),
        details=error.code or "",
    )
    return ext_proc_pb2.ProcessingResponse(immediate_response=immediate)


def passed_on(request: ext_proc_pb2.ProcessingRequest, echo: Mapping[str, bool]) -> ext_proc_pb2.ProcessingResponse:
    """The answer to everything else: as it came. A body of which Envoy keeps no copy is sent back, which `echo` says of
    `request_body` and `response_body`."""
    match kind := request.WhichOneof("request"):
        case "request_body" | "response_body":
            common = ext_proc_pb2.CommonResponse()
            if echo[kind]:
                chunk: ext_proc_pb2.HttpBody = getattr(request, kind)
                streamed = ext_proc_pb2.StreamedBodyResponse(body=chunk.body, end_of_stream=chunk.end_of_stream)
                common.body_mutation.streamed_response.CopyFrom(streamed)
            answer = ext_proc_pb2.BodyResponse(response=common)
            return ext_proc_pb2.ProcessingResponse(**{kind: answer})  # type: ignore[arg-type]
        case "request_trailers" | "response_trailers":
            return ext_proc_pb2.ProcessingResponse(**{kind: ext_proc_pb2.TrailersResponse()})  # type: ignore[arg-type]
        case "response_headers":
            return ext_proc_pb2.ProcessingResponse(response_headers=ext_proc_pb2.HeadersResponse())
        case _:
            raise AssertionError(f"{kind} has an answer of its own")


def echoes(first: ext_proc_pb2.ProcessingRequest) -> dict[str, bool]:
    """Which bodies have to be sent back. An Envoy that does not say how it sends them does as the protocol demands."""
    full = ext_proc_pb2.FULL_DUPLEX_STREAMED
    if not first.HasField("protocol_config"):
        return {"request_body": True, "response_body": True}
    config = first.protocol_config
    return {"request_body": config.request_body_mode == full, "response_body": config.response_body_mode == full}


def _set(values: Mapping[str, str]) -> ext_proc_pb2.HeaderMutation:
    options = [
        ext_proc_pb2.HeaderValueOption(
            header=ext_proc_pb2.HeaderValue(key=name, raw_value=value.encode()), append_action=_OVERWRITE
        )
        for name, value in values.items()
    ]
    return ext_proc_pb2.HeaderMutation(set_headers=options)
