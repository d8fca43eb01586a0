"""Limits of this process, for a while."""

import resource
from contextlib import contextmanager


@contextmanager
def file_size_limit(size):
    """Files larger than this cannot be written: it fails as a full disk does, in the middle of a write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
