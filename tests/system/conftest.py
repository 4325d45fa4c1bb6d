"""Whole clusters, started as a user starts them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import grpc.aio
import pytest
from harness.cluster import OPTIONS, Cluster

from rankway import rpc
from rankway.v1 import generate_pb2_grpc, router_pb2_grpc


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two workers of four ranks for tests that break nothing."""
    cluster = Cluster(*OPTIONS, tmp_path=tmp_path_factory.mktemp("cluster"))
    try:
        yield cluster.wait_ready()
    finally:
        assert cluster.stop() == 0


@pytest.fixture
def paced_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of this test alone whose simulator decodes in real time: streams last long enough to be interrupted."""
    cluster = Cluster(*OPTIONS[:-1], tmp_path=tmp_path_factory.mktemp("cluster"))
    try:
        yield cluster.wait_ready()
    finally:
        assert cluster.stop() == 0


@pytest.fixture
async def channel(cluster: Cluster) -> AsyncIterator[grpc.aio.Channel]:
    async with rpc.open_channel(cluster.router) as channel:
        yield channel


@pytest.fixture
def generation(channel: grpc.aio.Channel) -> generate_pb2_grpc.GenerationAsyncStub:
    return generate_pb2_grpc.GenerationStub(channel)


@pytest.fixture
def router(channel: grpc.aio.Channel) -> router_pb2_grpc.RouterAsyncStub:
    return router_pb2_grpc.RouterStub(channel)
