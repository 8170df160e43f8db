"""Decoding of image files: colours, sizes and errors that name the file."""

import io

import numpy as np
import pytest
from PIL import Image

from vbtta.data.images import decode_images


def png(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def test_contents_and_paths_give_the_same_pixels(tmp_path, rng):
    pixels = rng.integers(256, size=(3, 5, 6, 3), dtype=np.uint8)
    paths = [tmp_path / f"{row}.png" for row in range(3)]
    for path, image in zip(paths, pixels, strict=True):
        path.write_bytes(png(image))
    expected = pixels.transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(decode_images(paths, mode="RGB"), expected)
    np.testing.assert_array_equal(decode_images(map(png, pixels), mode="RGB"), expected)
    assert decode_images(paths, mode="L").shape == (3, 1, 5, 6)


def test_grey_images_keep_their_values(rng):
    pixels = rng.integers(256, size=(2, 4, 4), dtype=np.uint8)
    np.testing.assert_array_equal(decode_images(map(png, pixels), mode="L")[:, 0], pixels)
    np.testing.assert_array_equal(decode_images(map(png, pixels), mode="RGB"), np.repeat(pixels[:, None], 3, axis=1))


@pytest.mark.parametrize("shape", [(4, 8), (8, 4)])
def test_the_centre_square_is_resized(shape):
    pixels = np.zeros((*shape, 3), np.uint8)
    middle = tuple(slice((side - 4) // 2, (side - 4) // 2 + 4) for side in shape)
    pixels[middle] = 200
    assert (decode_images([png(pixels)], mode="RGB", size=4) == 200).all()
    assert (decode_images([png(pixels)], mode="RGB", size=2) == 200).all()


def test_images_of_two_sizes_need_a_size():
    files = [png(np.zeros((4, 4, 3), np.uint8)), png(np.zeros((6, 9, 3), np.uint8))]
    with pytest.raises(ValueError, match=r"some file, row 1: the image is 9 x 6 pixels, the first one 4 x 4.*size="):
        decode_images(files, mode="RGB", where="some file")
    assert decode_images(files, mode="RGB", size=4).shape == (2, 3, 4, 4)


def test_no_images():
    assert decode_images([], mode="L", size=5).shape == (0, 1, 5, 5)
    assert decode_images([], mode="RGB").shape == (0, 3, 0, 0)


def test_what_is_no_image_is_named(tmp_path):
    with pytest.raises(ValueError, match="inputs, row 1 is not an image that can be read"):
        decode_images([png(np.zeros((4, 4, 3), np.uint8)), b"no image"], mode="RGB", where="inputs")
    with pytest.raises(ValueError, match=r"absent\.png is not an image that can be read"):
        decode_images([tmp_path / "absent.png"], mode="RGB")
