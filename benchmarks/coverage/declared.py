"""Importing this makes torchvision importable beside a build of torch for another device."""

from benchmarks.coverage.vision import declare_operators

declare_operators()
