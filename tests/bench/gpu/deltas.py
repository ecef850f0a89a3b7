"""Sparse deltas: how long the trainer is held, how long until the commit, how many bytes; with both shadows."""

import time

import torch
from full import peak
from root import RUN, fresh_root
from rows import Row, row
from served import Served, served
from setting import Setting
from shapes import change, size_of

from refitd_client import Publication, PublishOptions, WeightPublisher
from refitd_client.contract.states import Kind
from refitd_client.delta import DeltaRules, layout

WARM = 3  # until page-locked memory for results is there
STEP = 0.2  # seconds between publications: no trainer's step is shorter, and room for the next delta is made in it


def deltas(setting: Setting) -> list[Row]:
    """Each share of changed elements with the shadow on the GPU and streamed; then sizes, encoded for the wire."""
    rows: list[Row] = []
    for shadow in ("gpu", "stream"):
        rows += _shadow(setting, shadow)
    return rows + (_wire(setting) if layout.available() else [])


def _shadow(setting: Setting, shadow: str) -> list[Row]:
    rows: list[Row] = []
    with (
        served(RUN) as service,
        fresh_root(setting.folder) as root,
        WeightPublisher(
            root, RUN, service.url, options=PublishOptions(shadow=shadow, delta_rules=DeltaRules(anchor_every=1000))
        ) as publisher,
    ):
        service.serve(publisher.publish(setting.weights, step=1, transport="delta"))
        step = 2
        for share in (0.01, 0.001):
            samples = [_one(setting, publisher, service, share, step + each) for each in range(WARM + setting.rounds)]
            step += len(samples)
            rows += _rows(setting, shadow, share, samples[WARM:])
        change(setting.weights, 0.01)
        extra = peak(lambda: publisher.publish(setting.weights, step=step, transport="delta"))
        rows.append(row("delta", setting.model, f"{shadow} shadow: extra GPU memory", [extra / 1e6], unit="MB"))
    return rows


def _one(
    setting: Setting, publisher: WeightPublisher, service: Served, share: float, step: int
) -> tuple[float, float, Publication]:
    change(setting.weights, share)
    time.sleep(STEP)
    torch.cuda.synchronize()
    began = time.perf_counter()
    publication = publisher.publish(setting.weights, step=step, transport="delta", block="staged")
    held = time.perf_counter()
    done = publication.committed()
    took = time.perf_counter() - began
    if done.kind is not Kind.DELTA:
        raise RuntimeError(f"step {step} was published in full: {done.why_full}")
    service.serve(done)
    return (held - began) * 1000, took * 1000, done


def _rows(setting: Setting, shadow: str, share: float, samples: list[tuple[float, float, Publication]]) -> list[Row]:
    label = f"{shadow} shadow, {share:.1%}"
    limits = (20.0, 40.0) if shadow == "gpu" else (1.5 * setting.copy_ms, None)
    if setting.model != "1.5B" and shadow == "gpu":
        limits = (None, None)
    wanted = {0.01: 30, 0.001: 250}[share]
    smaller = [size_of(setting.weights) / version.bytes for _, _, version in samples]
    return [
        row("delta", setting.model, f"{label}: trainer held", [held for held, _, _ in samples], limit=limits[0]),
        row(
            "delta", setting.model, f"{label}: committed", [took for _, took, _ in samples], limit=limits[1],
            stages=[version.timings for _, _, version in samples],
        ),
        row(
            "delta", setting.model, f"{label}: size, 1/", smaller, unit="", note=f"wanted at least {wanted}",
        ),
    ]  # fmt: skip


def _wire(setting: Setting) -> list[Row]:
    rows: list[Row] = []
    with (
        served(RUN) as service,
        fresh_root(setting.folder) as root,
        WeightPublisher(
            root,
            RUN,
            service.url,
            options=PublishOptions(shadow="gpu", compress_deltas=True, delta_rules=DeltaRules(anchor_every=1000)),
        ) as publisher,
    ):
        service.serve(publisher.publish(setting.weights, step=1, transport="delta"))
        step = 2
        for share, wanted in ((0.01, 60), (0.001, 500)):
            samples = [_one(setting, publisher, service, share, step + each) for each in range(WARM + setting.rounds)]
            step += len(samples)
            taken = [took for _, took, _ in samples[WARM:]]
            stages = [done.timings for _, _, done in samples[WARM:]]
            smaller = [size_of(setting.weights) / done.bytes for _, _, done in samples[WARM:]]
            note = f"wanted at least {wanted}"
            rows.append(row("delta", setting.model, f"zstd, {share:.1%}: size, 1/", smaller, unit="", note=note))
            rows.append(row("delta", setting.model, f"zstd, {share:.1%}: committed", taken, stages=stages))
    return rows
