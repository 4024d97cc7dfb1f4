"""Fields of encoded audio, against soundfile."""

from __future__ import annotations

import io
import re
import sys

import h5py
import numpy as np
import pytest
from conftest import assert_same_bits, require_extra

from h5async import AsyncReader, AudioField, MissingPackageError, Ragged
from h5async.errors import BudgetError, ConfigError, DatasetError, ReadError

soundfile = require_extra("soundfile")

RATE = 16000
DTYPES = ("float32", "float64", "int16", "int32")
FORMS = [
    ("WAV", "PCM_16"),
    ("WAV", "PCM_24"),
    ("WAV", "PCM_U8"),
    ("WAV", "FLOAT"),
    ("WAV", "ULAW"),
    ("FLAC", "PCM_16"),
    ("FLAC", "PCM_24"),
    ("OGG", "VORBIS"),
    ("AIFF", "PCM_16"),
]


def encoded(frames=300, channels=1, form="WAV", subtype="PCM_16", seed=0, rate=RATE):
    """Return noise as soundfile encodes it."""
    noise = np.random.default_rng(seed).uniform(-1, 1, (frames, channels))
    stream = io.BytesIO()
    soundfile.write(stream, noise, rate, format=form, subtype=subtype)
    return stream.getvalue()


def by_soundfile(data, dtype="float32", **how):
    return soundfile.read(io.BytesIO(data), dtype=dtype, **how)[0]


def write(path, recordings, flat=False):
    """Write recordings as elements of variable length, or as flat bytes with their ends."""
    with h5py.File(path, "w") as file:
        if flat:
            file["audio"] = np.frombuffer(b"".join(recordings), np.uint8)
            file["ends"] = np.cumsum([len(one) for one in recordings])
        else:
            data = file.create_dataset("audio", (len(recordings),), h5py.vlen_dtype("u1"))
            for number, one in enumerate(recordings):
                data[number] = np.frombuffer(one, np.uint8)
        file["labels"] = np.arange(len(recordings))
    return path


def reading(path, field=None, **options):
    field = AudioField("audio") if field is None else field
    given = {"hdf5_path": path, "fields": {"audio": field, "label": "labels"}, "batch_size": 4}
    return AsyncReader(**(given | options))


def all_of(path, field=None, **options):
    """Return the recording of each sample of an epoch, and the batches."""
    found, batches = {}, []
    with reading(path, field, **options) as reader:
        for batch in reader:
            copied = batch.copy()
            batches.append(copied.audio)
            found |= dict(zip(batch.index.tolist(), copied.audio, strict=True))
    return found, batches


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """Recordings of all forms, of 0 to 900 frames: the file, and their bytes."""
    lengths = (300, 0, 900, 1, 450)
    data = [
        encoded(lengths[number % 5], 1, *FORMS[number % len(FORMS)], seed=number)
        for number in range(17)
        if lengths[number % 5] or FORMS[number % len(FORMS)][0] == "WAV"
    ]
    return write(tmp_path_factory.mktemp("audio") / "a.h5", data), data


@pytest.fixture(scope="module")
def stereo(tmp_path_factory):
    data = [encoded(200 + 31 * n, 2, *FORMS[n % len(FORMS)], seed=n) for n in range(9)]
    return write(tmp_path_factory.mktemp("audio") / "b.h5", data), data


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"num_threads": 0}, {"workers": "process"}])
def test_frames_are_those_of_soundfile(several, dtype, options):
    path, data = several
    found, batches = all_of(path, AudioField("audio", dtype=dtype), shuffle="full", **options)
    assert sorted(found) == list(range(len(data)))
    for number, frames in found.items():
        assert_same_bits(frames, by_soundfile(data[number], dtype))
    assert all(isinstance(batch, Ragged) for batch in batches)


@pytest.mark.skipif("MP3" not in soundfile.available_formats(), reason="libsndfile without MP3")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("frames", [None, 700])
def test_frames_of_mp3s_are_those_of_soundfile(tmp_path, dtype, frames):
    data = [encoded(3000 + n, 1, "MP3", "MPEG_LAYER_III", seed=n) for n in range(3)]
    field = AudioField("audio", dtype=dtype, frames=frames)
    found, _ = all_of(write(tmp_path / "a.h5", data), field)
    for number, got in found.items():
        assert_same_bits(got, by_soundfile(data[number], dtype)[:frames])


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_channels(stereo, dtype):
    path, data = stereo
    found, batches = all_of(path, AudioField("audio", dtype=dtype, channels=2))
    for number, frames in found.items():
        assert_same_bits(frames, by_soundfile(data[number], dtype))
    assert batches[0].values.shape[1:] == (2,)


@pytest.mark.parametrize("dtype", [None, "float64"])
def test_the_mean_of_channels(stereo, dtype, monkeypatch):
    monkeypatch.setattr("h5async.samples.audiokind._MIXED_NBYTES", 999)
    path, data = stereo
    for number, frames in all_of(path, AudioField("audio", dtype=dtype, mono=True))[0].items():
        truth = by_soundfile(data[number], dtype or "float32", always_2d=True)
        assert_same_bits(frames, truth.mean(axis=1))


def test_flat_bytes_with_offsets(tmp_path, several):
    path, data = write(tmp_path / "a.h5", several[1], flat=True), several[1]
    field = AudioField("audio", offsets="ends", offsets_kind="ends")
    for number, frames in all_of(path, field)[0].items():
        assert_same_bits(frames, by_soundfile(data[number]))


def test_opaque_bytes(tmp_path, several):
    data = several[1][:4]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["audio"] = np.frombuffer(b"".join(data), "V1")
        file["ends"] = np.cumsum([len(one) for one in data])
        node = file.create_dataset("elements", (len(data),), h5py.vlen_dtype(np.dtype("V1")))
        for number, one in enumerate(data):
            node[number] = np.frombuffer(one, "V1")
        file["labels"] = np.arange(len(data))
    flat = AudioField("audio", offsets="ends", offsets_kind="ends")
    for field in (flat, AudioField("elements")):
        for number, frames in all_of(tmp_path / "a.h5", field)[0].items():
            assert_same_bits(frames, by_soundfile(data[number]))


def test_the_first_frames(several):
    path, data = several
    for number, frames in all_of(path, AudioField("audio", frames=310))[0].items():
        assert_same_bits(frames, by_soundfile(data[number])[:310])


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", ["thread", "process"])
def test_parts_of_one_length_are_an_array(several, stereo, workers):
    for (path, data), how in ((several, {}), (stereo, {"channels": 2}), (stereo, {"mono": True})):
        field = AudioField("audio", frames=310, dense=True, **how)
        found, batches = all_of(path, field, workers=workers)
        assert {type(batch) for batch in batches} == {np.ndarray}
        for number, frames in found.items():
            truth = by_soundfile(data[number])[:310]
            truth = truth.mean(axis=1) if "mono" in how else truth
            assert_same_bits(frames[: len(truth)], truth)
            assert len(frames) == 310
            assert not frames[len(truth) :].any()


def place_of(part, whole):
    """Return where a part begins in a recording of noise."""
    found = [at for at in range(len(whole) - len(part) + 1) if whole[at] == part[0]]
    found = [at for at in found if np.array_equal(whole[at : at + len(part)], part)]
    assert found
    return found[0]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("dense", [False, True])
def test_random_parts_depend_on_seed_epoch_and_sample_alone(tmp_path, dense):
    data = [encoded(500, 1, "FLAC" if n % 2 else "WAV", seed=n) for n in range(24)]
    path = write(tmp_path / "a.h5", data)
    field = AudioField("audio", frames=20, crop="random", dense=dense)
    parts, _ = all_of(path, field)
    places = [place_of(parts[n], by_soundfile(one)) for n, one in enumerate(data)]
    assert len(set(places)) > 15
    assert max(places) > 300 > 150 > min(places)
    ways = {"num_threads": 0, "batch_size": 5}, {"shuffle": "full"}, {"workers": "process"}
    for options in ways:
        for number, part in all_of(path, field, **options)[0].items():
            assert_same_bits(part, parts[number])
    others, _ = all_of(path, field, seed=1)
    assert any(not np.array_equal(others[n], parts[n]) for n in parts)
    with reading(path, field, batch_size=24) as reader:
        _, second = (next(iter(reader)).copy() for _ in range(2))
        assert any(not np.array_equal(second.audio[n], parts[n]) for n in parts)
        again = reader.read(range(24)).audio
        assert [place_of(again[n], by_soundfile(one)) for n, one in enumerate(data)] != places


def test_two_fields_are_cut_alike(tmp_path):
    data = [encoded(500, 1, seed=n) for n in range(8)]
    path = write(tmp_path / "a.h5", data)
    how = {"frames": 20, "crop": "random"}
    fields = {"mix": AudioField("audio", **how), "voice": AudioField("audio", dense=True, **how)}
    with AsyncReader(hdf5_path=path, fields=fields, batch_size=8) as reader:
        batch = reader.get_next_batch()
        assert_same_bits(np.stack(list(batch.mix)), batch.voice)


def test_given_samples(several):
    path, data = several
    with reading(path) as reader:
        reader.fetch_data([3, 1, 3])
        for batch in (reader.get_next_batch(), reader.read([3, 1, 3])):
            for frames, number in zip(batch.audio, (3, 1, 3), strict=True):
                assert_same_bits(frames, by_soundfile(data[number]))


def test_postprocess_and_caches(several):
    path, data = several

    def double(audio, label):
        return Ragged(audio.values * 2, audio.offsets), label

    for options in ({"postprocess": double}, {"postprocess": double, "cache": "host"}):
        with reading(path, **options) as reader:
            for batch in (*reader, *reader):
                for frames, number in zip(batch.audio, batch.index, strict=True):
                    assert_same_bits(frames, by_soundfile(data[number]) * 2)


def test_a_file_of_options(tmp_path, several):
    (tmp_path / "options.toml").write_text(f"""
        hdf5_path = "{several[0]}"
        batch_size = 3
        fields.audio = {{ path = "audio", kind = "audio", frames = 7, dense = true }}
        fields.label = "labels"
    """)
    with AsyncReader(tmp_path / "options.toml") as reader:
        assert reader.get_next_batch().audio.shape == (3, 7)


# --- errors --------------------------------------------------------------------------------------


def damaged_flac():
    data = bytearray(encoded(4000, 1, "FLAC"))
    data[len(data) // 2 : len(data) // 2 + 40] = bytes(40)
    return bytes(data)


BROKEN = {
    "no bytes": (b"", r"its first bytes are none"),
    "another format": (b"\xff\xd8\xff\xe0 a JPEG", r"first bytes are ff d8 ff e0"),
    "a header alone": (encoded(4000, 1, "FLAC")[:60], "cannot be decoded"),
    "damaged": (damaged_flac(), "cannot be decoded"),
    "another rate": (encoded(rate=8000), r"sample rate of 8,000 Hz, and sample_rate is 16,000"),
    "two channels": (encoded(channels=2), r"has 2 channels, and channels is 1; .*mono=True"),
}


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("options", [{}, {"dense": True, "frames": 5000}])
@pytest.mark.parametrize("workers", ["thread", "process"])
def test_an_error_names_file_dataset_and_sample(tmp_path, how, options, workers):
    data, words = BROKEN[how]
    good = [encoded(100, seed=n) for n in range(9)]
    first, second = write(tmp_path / "a.h5", good), tmp_path / "b.h5"
    write(second, [*good[:2], data, *good[3:]])
    field = AudioField("audio", sample_rate=RATE, **options)
    where = rf'{re.escape(str(second))}: dataset "audio": the recording of sample 11'
    with reading([first, second], field, batch_size=3, workers=workers) as reader:
        assert_same_bits(reader.get_next_batch().audio[1][:100], by_soundfile(good[1]))
        for _ in range(2):
            reader.get_next_batch()
        with pytest.raises(ReadError, match=rf"{where} \(sample 2 of this file\).*{words}"):
            reader.get_next_batch()
        assert len(reader.get_next_batch().audio) == 3


@pytest.mark.slow
def test_damaged_bytes_are_an_error_or_frames(tmp_path, capfd):
    """Nothing is written to standard error, as Python does of errors in a callback of C."""
    rng = np.random.default_rng(20261124)
    damaged = []
    for number in range(400):
        data = bytearray(encoded(500, 1, *FORMS[number % len(FORMS)], seed=number))
        for _ in range(rng.integers(1, 9)):
            at = int(min(rng.exponential(60), len(data) - 1))
            data[at : at + 4] = rng.choice([b"\0" * 4, b"\xff" * 4, rng.bytes(1)])
        damaged.append(bytes(data))
    path = write(tmp_path / "a.h5", damaged)
    good, errors = 0, []
    with reading(path, AudioField("audio", mono=True), batch_size=1, num_threads=0) as reader:
        for _ in damaged:
            try:
                good += len(reader.get_next_batch().audio)
            except ReadError as error:
                errors.append(str(error))
    assert all("the recording of sample" in error for error in errors)
    assert 0 < good < len(damaged)
    assert capfd.readouterr().err == ""


def test_a_recording_that_declares_many_frames(tmp_path):
    """The frames in the header of a FLAC: 36 bits from bit 108 of its first block on."""
    data = bytearray(encoded(400, 1, "FLAC"))
    data[21] |= 0x0F
    path = write(tmp_path / "a.h5", [bytes(data)])
    with reading(path, batch_size=1) as reader, pytest.raises(ReadError, match="bytes of audio"):
        reader.get_next_batch()
    field = AudioField("audio", frames=500, dense=True)
    with reading(path, field, batch_size=1) as reader, pytest.raises(ReadError, match="decoded"):
        reader.get_next_batch()


def test_the_error_names_the_recording_that_declares_most(tmp_path):
    path = write(tmp_path / "a.h5", [encoded(n, 1, "FLAC") for n in (9, 40000, 8)])
    words = r"of sample 1 declares 40,000 frames, and its batch 160,068 bytes of audio"
    with (
        reading(path, batch_size=3, max_batch_bytes=300_000) as reader,
        pytest.raises(ReadError, match=words),
    ):
        reader.get_next_batch()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", ["thread", "process"])
def test_a_flac_whose_header_has_no_number_of_frames(tmp_path, workers):
    """As encoders write it to a pipe."""
    data = bytearray(encoded(400, 1, "FLAC"))
    data[21] &= 0xF0
    data[22:26] = bytes(4)
    good = encoded(300, seed=1)
    path = write(tmp_path / "a.h5", [good, bytes(data)])
    for options in (
        {},
        {"frames": 100, "crop": "random"},
        {"frames": 500},
        {"frames": 500, "dense": True},
    ):
        field = AudioField("audio", **options)
        words = "recording of sample 1 does not declare its number of frames, like a FLAC"
        with (
            reading(path, field, batch_size=2, workers=workers) as reader,
            pytest.raises(ReadError, match=words),
        ):
            reader.get_next_batch()
    field = AudioField("audio", frames=100)
    with reading(path, field, batch_size=2, workers=workers) as reader:
        audio = reader.get_next_batch().audio
        assert_same_bits(audio[0], by_soundfile(good)[:100])
        assert_same_bits(audio[1], by_soundfile(bytes(data), frames=100))


def test_limits(several, tmp_path):
    field = AudioField("audio", frames=1 << 20, dense=True)
    with pytest.raises(BudgetError, match="max_batch_bytes"):
        reading(several[0], field, max_batch_bytes=1 << 20)
    path = write(tmp_path / "a.h5", [encoded(9000, 1, "OGG", "VORBIS")] * 8)
    with (
        reading(path, max_batch_bytes=1 << 18, batch_size=8, prefetch=2) as reader,
        pytest.raises(ReadError, match="288,000 bytes of audio, more than the 131,072 that"),
    ):
        reader.get_next_batch()


def test_what_is_no_bytes_is_refused(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("audio", (2,), h5py.vlen_dtype("i4"))
        file["labels"] = [0, 1]
    with pytest.raises(DatasetError, match=r"recordings are bytes \(uint8\), found int32"):
        reading(tmp_path / "a.h5")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scale": 2.0}, "scale cannot be used with audio"),
        ({"axes": (0, 2, 1)}, "axes cannot be used with audio"),
        ({"decode_cf": True}, "decode_cf cannot be used"),
        ({"steps": range(2)}, "steps need fields"),
        ({"pad_to": 9}, "give audio frames, and dense=True"),
        ({"dtype": "float16"}, "must be float32, float64, int16 or int32, found float16"),
        ({"mono": True, "channels": 2}, "leave out channels"),
        ({"mono": True, "dtype": "int16"}, "need a float dtype"),
        ({"dense": True}, "dense needs frames"),
        ({"crop": "random"}, 'crop="random" needs frames'),
        ({"frames": 0}, "frames"),
    ],
)
def test_options_that_do_not_fit(options, words):
    with pytest.raises(ConfigError, match=words):
        AudioField("audio", **options)


def test_without_soundfile_the_error_names_the_package(several, monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(MissingPackageError, match="pip install soundfile"):
        reading(several[0])
