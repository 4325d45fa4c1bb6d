"""The registry: which workers are there, and which global ranks each owns.

Stateless: every record is a key of a NATS JetStream bucket whose TTL is the worker's lease. Any number of replicas may run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rankway import bus, logs, rpc, service
from rankway.registry.admission import Admission
from rankway.registry.bucket import Bucket
from rankway.registry.metrics import Metrics
from rankway.registry.mirror import Mirror
from rankway.registry.servicer import RegistryServicer
from rankway.registry.settings import RegistrySettings
from rankway.registry.view import LOG_SIZE, View
from rankway.v1 import registry_pb2_grpc

log = logs.get("registry")

SERVICE_NAME = "rankway.v1.Registry"
GRACE_S = 1.0


async def run(settings: RegistrySettings, *, ready: service.Ready, stop: asyncio.Event) -> None:
    """Serve until `stop` is set.

    Start: listen (calls answer UNAVAILABLE, health says NOT_SERVING) → connect to NATS → open the bucket → load it → ready.
    Stop: watch streams end → health NOT_SERVING → no new calls, running ones get a second → follow the bucket no more →
    close NATS → metrics.

    Raises:
        OSError: an address can't be had, or the bucket can't be used.
    """
    metrics = Metrics()
    metrics_host, _, metrics_port = settings.metrics_listen.rpartition(":")
    metrics_address, close_metrics = service.serve_metrics(metrics.registry, metrics_host, int(metrics_port))
    try:
        server = rpc.Server([SERVICE_NAME])
        servicer = RegistryServicer(metrics, settings.lease_ttl_s)
        registry_pb2_grpc.add_RegistryServicer_to_server(servicer, server.grpc)
        grpc_port = await server.start(settings.grpc_listen)
        addresses = {"grpc": f"{settings.grpc_listen.rpartition(':')[0]}:{grpc_port}", "metrics": metrics_address}
        following = asyncio.create_task(_follow(settings, server, servicer, metrics, lambda: ready(addresses)))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({following, stopping}, return_when=asyncio.FIRST_COMPLETED)
            servicer.stop()
            await server.stop(GRACE_S)
        finally:
            stopping.cancel()
            following.cancel()
            await asyncio.wait({following, stopping})
        if not following.cancelled():
            following.result()
    finally:
        close_metrics()


async def _follow(
    settings: RegistrySettings,
    server: rpc.Server,
    servicer: RegistryServicer,
    metrics: Metrics,
    on_ready: Callable[[], None],
) -> None:
    """Connect to NATS and follow the bucket until cancelled; health follows whether the view is up to date."""
    client, status = await bus.connect(settings.nats_url, name="rankway-registry")
    try:
        bucket = Bucket(client, settings.bucket, replicas=settings.bucket_replicas, lease_s=settings.lease_ttl_s)
        admission = Admission(bucket)
        mirror = Mirror(client, status, bucket, View(settings.lease_ttl_s, LOG_SIZE), settings.lease_ttl_s)
        metrics.observe(mirror, admission)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(mirror.run())
            await mirror.loaded()
            servicer.attach(admission, mirror)
            await server.set_ready(True)
            on_ready()
            while True:
                await mirror.state_changed()
                await server.set_ready(mirror.following)
    finally:
        await client.close()
