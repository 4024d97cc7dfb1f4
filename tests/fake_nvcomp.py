"""A stand-in for nvCOMP beside `fake_cupy`: the same calls, done on the CPU when a stream is run.

It reads addresses and sizes out of "device" memory when the work is done, as nvCOMP does, and says
in `states` what cannot be decoded. Deflate's alignment is insisted on.
"""

from __future__ import annotations

import ctypes
import zlib

import imagecodecs
import numpy as np

from h5async.deliver.devicedecode import Blocks


def words(address, count, dtype=np.uint64):
    nbytes = count * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype)


def decoded(form, data, nbytes):
    if form == "deflate":
        decoder = zlib.decompressobj(-15)
        found = decoder.decompress(data, nbytes + 1)
        if not decoder.eof:
            raise ValueError("no end")
        return found
    decode = {"zstd": imagecodecs.zstd_decode, "lz4": imagecodecs.lz4_decode}[form]
    return bytes(decode(data, out=nbytes))


class FakeNvcomp:
    version = "0 (a stand-in)"

    def __init__(self, cupy, simulation, damage=None):
        self.streams = cupy.cuda.streams
        self.simulation = simulation
        self.damage = damage
        self.calls = self.blocks = 0

    def temp_nbytes(self, form, count, largest_nbytes, total_nbytes):
        assert form in ("deflate", "zstd", "lz4")
        return 8 * count

    def decompress(self, form, blocks, temp, stream):
        count = blocks.states.size
        assert count > 0
        assert temp.nbytes >= 8 * count
        blocks = Blocks(*(array.data.ptr for array in blocks))
        self.calls += 1
        self.blocks += count

        def run():
            words(temp.data.ptr, count)[...] = 0xDEAD
            sizes, rooms = words(blocks.source_nbytes, count), words(blocks.target_nbytes, count)
            begins, goes_to = words(blocks.sources, count), words(blocks.targets, count)
            actual = words(blocks.actual_nbytes, count)
            state = words(blocks.states, count, np.int32)
            for i in range(count):
                assert form != "deflate" or begins[i] % 4 == 0
                data = ctypes.string_at(int(begins[i]), int(sizes[i]))
                try:
                    found = decoded(form, data, int(rooms[i]))
                    if len(found) > rooms[i]:
                        raise ValueError("too long")
                except Exception:
                    state[i], actual[i] = 12, 0
                    continue
                if self.damage is not None:
                    found = self.damage(found)
                ctypes.memmove(int(goes_to[i]), found, len(found))
                state[i], actual[i] = 0, len(found)

        self.simulation.put(self.streams[stream.ptr], run)
