"""Readers of the official file formats, partitioners and splits."""

from dqnfed.data.federate import federation_of
from dqnfed.data.load import load
from dqnfed.data.manifest import ClientIndices, Manifest
from dqnfed.data.partition import partition
from dqnfed.data.raw import DataError, RawData
from dqnfed.data.split import split

__all__ = ["ClientIndices", "DataError", "Manifest", "RawData", "federation_of", "load", "partition", "split"]
