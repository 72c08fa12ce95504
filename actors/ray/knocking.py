"""Whether Ray's head answers: asked once, before Ray asks it again and again, for minutes and in its own lines."""

from __future__ import annotations

import socket

import grpc
from ray._private.gcs_utils import create_gcs_channel
from ray._private.services import canonicalize_bootstrap_address
from ray.core.generated.gcs_service_pb2 import GetClusterIdRequest
from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub

CONNECT_S = 5.0
ANSWER_S = 20.0  # of a head that has much to do


def knock(address: str) -> None:
    """address: HOST:PORT, or "auto" for the Ray that this machine or RAY_ADDRESS names.

    Raises OSError, and ValueError where it is no address.
    """
    if address == "auto":
        found = canonicalize_bootstrap_address(address)  # ConnectionError: there is none
        if found is None or "://" in found:
            return  # no head's own address: Ray knows what to do with it
        address = found
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise ValueError(f"{address!r} is not HOST:PORT, such as 10.0.0.7:6379")
    socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    with create_gcs_channel(address) as channel:
        try:
            NodeInfoGcsServiceStub(channel).GetClusterId(GetClusterIdRequest(), timeout=ANSWER_S)
        except grpc.RpcError as error:
            raise OSError(_said(error)) from error


def _said(error: grpc.RpcError) -> str:
    match status := error.code():
        case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
            return "it takes another token, or none"
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"who listens there does not answer as Ray does within {ANSWER_S:g} s"
        case _:
            return f"who listens there does not answer as Ray does ({status.name})"
