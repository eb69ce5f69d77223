"""The messages of Envoy's external processing protocol (`envoy.service.ext_proc.v3`) and of gRPC's health checks, as
far as an endpoint picker reads or writes them.

They are written down here, and not taken from the package `xds-protos`, because that one installs its own copies of
`opentelemetry.proto` and `google.api` over the copies that our span exporters use. Fields that are not named here are
skipped, as protobuf has it; names of types are our own, since only numbers travel.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

PACKAGE = "sluice.ext_proc"
STRUCT = "google.protobuf.Struct"

# Each field: its type, name and number; `*` marks a repeated one, `|` a member of the message's oneof.
SCHEMA: dict[str, tuple[str, ...]] = {
    "HeaderValue": ("string key 1", "string value 2", "bytes raw_value 3"),
    "HeaderMap": ("*HeaderValue headers 1",),
    "HttpHeaders": ("HeaderMap headers 1", "bool end_of_stream 3"),
    "HttpBody": ("bytes body 1", "bool end_of_stream 2"),
    "HttpTrailers": ("HeaderMap trailers 1",),
    "Namespace": ("string key 1", "Struct value 2"),
    "Metadata": ("*Namespace filter_metadata 1",),
    "ProtocolConfiguration": ("int32 request_body_mode 1", "int32 response_body_mode 2"),
    "ProcessingRequest": (
        "|HttpHeaders request_headers 2",
        "|HttpHeaders response_headers 3",
        "|HttpBody request_body 4",
        "|HttpBody response_body 5",
        "|HttpTrailers request_trailers 6",
        "|HttpTrailers response_trailers 7",
        "Metadata metadata_context 8",
        "bool observability_mode 10",
        "ProtocolConfiguration protocol_config 11",
    ),
    "HeaderValueOption": ("HeaderValue header 1", "int32 append_action 3"),
    "HeaderMutation": ("*HeaderValueOption set_headers 1", "*string remove_headers 2"),
    "StreamedBodyResponse": ("bytes body 1", "bool end_of_stream 2"),
    "BodyMutation": ("StreamedBodyResponse streamed_response 3",),
    "CommonResponse": (
        "HeaderMutation header_mutation 2",
        "BodyMutation body_mutation 3",
        "bool clear_route_cache 5",
    ),
    "HeadersResponse": ("CommonResponse response 1",),
    "BodyResponse": ("CommonResponse response 1",),
    "TrailersResponse": ("HeaderMutation header_mutation 1",),
    "HttpStatus": ("int32 code 1",),
    "ImmediateResponse": ("HttpStatus status 1", "HeaderMutation headers 2", "bytes body 3", "string details 5"),
    "ProcessingResponse": (
        "|HeadersResponse request_headers 1",
        "|HeadersResponse response_headers 2",
        "|BodyResponse request_body 3",
        "|BodyResponse response_body 4",
        "|TrailersResponse request_trailers 5",
        "|TrailersResponse response_trailers 6",
        "|ImmediateResponse immediate_response 7",
        "Struct dynamic_metadata 8",
    ),
    "HealthCheckRequest": ("string service 1",),
    "HealthCheckResponse": ("int32 status 1",),
}
KIND = "kind"  # name of a message's oneof

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {"string": _Field.TYPE_STRING, "bytes": _Field.TYPE_BYTES}
_SCALARS |= {"bool": _Field.TYPE_BOOL, "int32": _Field.TYPE_INT32}  # enumerations travel as integers


def _add_field(message: Any, line: str) -> None:
    kind, name, number = line.lstrip("*|").split()
    field = message.field.add(name=name, number=int(number))
    field.label = _Field.LABEL_REPEATED if line.startswith("*") else _Field.LABEL_OPTIONAL
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _Field.TYPE_MESSAGE
        field.type_name = f".{STRUCT}" if kind == "Struct" else f".{PACKAGE}.{kind}"
    if line.startswith("|"):
        if not message.oneof_decl:
            message.oneof_decl.add(name=KIND)
        field.oneof_index = 0


def _classes() -> dict[str, Any]:
    """The class of each message, in a pool of their own, so that Envoy's may be loaded beside them."""
    file = descriptor_pb2.FileDescriptorProto(name=f"{PACKAGE}.proto", package=PACKAGE, syntax="proto3")
    file.dependency.append(struct_pb2.DESCRIPTOR.name)
    for name, fields in SCHEMA.items():
        message = file.message_type.add(name=name)
        for line in fields:
            _add_field(message, line)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(file.SerializeToString())
    find = pool.FindMessageTypeByName
    return {name: message_factory.GetMessageClass(find(f"{PACKAGE}.{name}")) for name in SCHEMA}


_CLASSES = _classes()
ProcessingRequest: Any = _CLASSES["ProcessingRequest"]
ProcessingResponse: Any = _CLASSES["ProcessingResponse"]
HealthCheckRequest: Any = _CLASSES["HealthCheckRequest"]
HealthCheckResponse: Any = _CLASSES["HealthCheckResponse"]
