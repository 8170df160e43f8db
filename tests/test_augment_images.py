"""Views of images: exactness, proportions, agreement with kornia and torch, export, other libraries."""

import pickle

import albumentations
import kornia
import numpy as np
import pytest
import torch
import ttach
from PIL import Image

from vbtta import collect_views
from vbtta.augment import (
    Blur,
    Brightness,
    Chain,
    Contrast,
    Crop,
    CutMix,
    FeatureDropout,
    Gamma,
    GaussianNoise,
    HorizontalFlip,
    Identity,
    Mixup,
    Rotate,
    Rotate90,
    RowStreams,
    Shift,
    VerticalFlip,
    Zoom,
    apply_view,
    as_view,
    as_views,
    d4,
    five_crop,
    flips,
    standard_images,
)

HEIGHT, WIDTH = 12, 20


@pytest.fixture
def images():
    return torch.rand(5, 3, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(0))


def deterministic_views():
    views = {view.name: view for view in [*flips(), *d4(), *five_crop(), *standard_images()]}
    extra = [
        Rotate(33.5, "zeros"),
        Rotate(-5, "border"),
        Zoom(1.5, "border"),
        Shift(0.3, -0.2, "zeros"),
        Shift(-0.1, 0.4, "border"),
        Gamma(2.0, mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.3)),
    ]
    return [*views.values(), *extra]


def one_of_each_kind():
    return list({type(view): view for view in deterministic_views()}.values())


def test_flips_and_quarter_turns_are_exact_on_images_that_are_not_square(images):
    array = images.numpy()
    np.testing.assert_array_equal(HorizontalFlip()(images), array[..., ::-1])
    np.testing.assert_array_equal(VerticalFlip()(images), array[..., ::-1, :])
    for quarters in (1, 2, 3):
        turned = Rotate90(quarters)(images)
        np.testing.assert_array_equal(turned, np.rot90(array, quarters, axes=(2, 3)))
        assert turned.shape[2:] == ((WIDTH, HEIGHT) if quarters % 2 else (HEIGHT, WIDTH))
        torch.testing.assert_close(Rotate90(4 - quarters)(turned), images, rtol=0, atol=0)


def test_d4_is_the_group_of_the_square():
    square = torch.arange(9.0).reshape(1, 1, 3, 3)
    results = {tuple(view(square).flatten().tolist()) for view in d4()}
    assert len(results) == 8
    for first in d4():
        for second in d4():
            assert tuple(second(first(square)).flatten().tolist()) in results


def test_rotation_agrees_with_kornia_and_with_the_exact_quarter_turn(images):
    images = images.double()  # a coordinate in single precision is off by 1e-6 of a pixel
    for degrees in (15.0, -40.0):
        for padding in ("zeros", "border", "reflection"):
            expected = kornia.geometry.transform.rotate(images, images.new_tensor([degrees]), padding_mode=padding)
            torch.testing.assert_close(Rotate(degrees, padding)(images), expected, rtol=0, atol=1e-6)
    square = images[..., :HEIGHT]
    torch.testing.assert_close(Rotate(90)(square), Rotate90(1)(square), rtol=0, atol=2e-5)
    torch.testing.assert_close(Rotate(180)(images), Rotate90(2)(images), rtol=0, atol=2e-5)


def test_blur_and_colours_agree_with_kornia(images):
    enhance = kornia.enhance
    for batch in (images, images[:, :2], images[:, :1]):
        cases = {
            Blur(1.3): kornia.filters.gaussian_blur2d(batch, (9, 9), (1.3, 1.3)),
            Contrast(1.4): enhance.adjust_contrast_with_mean_subtraction(batch, 1.4),
            Brightness(0.2): enhance.adjust_brightness(batch, 0.2),
            Gamma(0.7): enhance.adjust_gamma(batch, 0.7),
        }
        for view, expected in cases.items():
            torch.testing.assert_close(view(batch), expected, rtol=0, atol=1e-6)


def test_rotation_keeps_distances_on_images_that_are_not_square():
    image = torch.zeros(1, 1, 41, 81)
    image[0, 0, 20, 70] = 1.0  # 30 pixels to the right of the centre
    down, across = np.unravel_index(int(Rotate(30, "zeros")(image).argmax()), (41, 81))
    assert abs(np.hypot(down - 20, across - 40) - 30) < 0.8
    assert down < 20  # counter-clockwise: it went up
    assert abs(np.degrees(np.arctan2(20 - down, across - 40)) - 30) < 2


def test_zoom_enlarges_about_the_centre():
    image = torch.zeros(1, 1, 41, 81)
    image[0, 0, 20, 60] = 1.0
    down, across = np.unravel_index(int(Zoom(1.5)(image).argmax()), (41, 81))
    assert [down, across] == [20, 70]
    down, across = np.unravel_index(int(Zoom(0.5, "zeros")(image).argmax()), (41, 81))
    assert [down, across] == [20, 50]


def test_shift_moves_whole_pixels(images):
    moved = Shift(0.1, -0.25, "zeros")(images)  # 2 to the right, 3 up
    torch.testing.assert_close(moved[..., :-3, 2:], images[..., 3:, :-2], rtol=0, atol=0)
    assert not moved[..., -3:, :].any()
    assert not moved[..., :2].any()
    torch.testing.assert_close(Shift(0.0, 0.0)(images), images, rtol=0, atol=0)
    border = Shift(-0.1, 0.0, "border")(images)
    torch.testing.assert_close(border[..., -1], images[..., -1], rtol=0, atol=0)
    mirrored = Shift(0.1, 0.0)(images)
    torch.testing.assert_close(mirrored[..., 1], images[..., 1], rtol=0, atol=0)


def test_crops_show_the_part_they_name():
    across = torch.linspace(0, 1, WIDTH).expand(1, 1, HEIGHT, WIDTH)
    down = torch.linspace(0, 1, HEIGHT)[:, None].expand(1, 1, HEIGHT, WIDTH)
    for view in five_crop(0.5):
        horizontal, vertical = view(across).mean(), view(down).mean()
        for value, low, high in ((horizontal, "left", "right"), (vertical, "top", "bottom")):
            side = 0.25 if low in view.position else 0.75 if high in view.position else 0.5  # type: ignore[attr-defined]
            assert abs(value - side) < 0.03, view.name
        assert view(across).shape == across.shape
    torch.testing.assert_close(Crop("center", 1.0)(across), across)


def test_colours_do_what_they_say(images):
    torch.testing.assert_close(Brightness(0.2)(images), (images + 0.2).clamp(0, 1))
    torch.testing.assert_close(Gamma(2.0)(images), images**2)
    grey = Contrast(1e-6)(images)
    assert grey.std(dim=(1, 2, 3)).max() < 1e-4
    assert Contrast(0.5)(images).std() < images.std() < Contrast(1.2)(images).std()
    smooth = Blur(1.0)(images)
    assert smooth.std() < images.std()
    torch.testing.assert_close(smooth.mean(), images.mean(), rtol=0.02, atol=0)


@pytest.mark.parametrize(
    "make", [lambda **k: Brightness(-0.1, **k), lambda **k: Contrast(1.4, **k), lambda **k: Gamma(0.7, **k)]
)
def test_colours_of_normalised_images_are_changed_before_normalisation(images, make):
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
    shift, scale = torch.tensor(mean).view(1, 3, 1, 1), torch.tensor(std).view(1, 3, 1, 1)
    expected = (make()(images) - shift) / scale
    torch.testing.assert_close(make(mean=mean, std=std)((images - shift) / scale), expected, rtol=1e-5, atol=1e-5)
    black = ((torch.zeros(1, 3, 4, 4) - shift) / scale) - 1e-6  # a hair below black must not become NaN
    assert make(mean=mean, std=std)(black).isfinite().all()


@pytest.mark.parametrize("view", deterministic_views(), ids=lambda view: view.name)
def test_every_view_keeps_type_and_rows_and_does_not_depend_on_the_batch(view, images):
    whole = apply_view(view, images)
    assert whole.dtype == images.dtype
    one_by_one = torch.cat([view(images[i : i + 1]) for i in range(len(images))])
    torch.testing.assert_close(whole, one_by_one, rtol=0, atol=1e-6)
    if "rotate90" not in view.name:
        assert whole.shape == images.shape
    if view.name != "identity":
        assert not torch.equal(whole, images)
    assert view(images.double()).dtype == torch.float64
    from_numpy = view(images.numpy())
    assert isinstance(from_numpy, np.ndarray)
    np.testing.assert_array_equal(from_numpy, whole.numpy())
    assert pickle.loads(pickle.dumps(view)) == view


@pytest.mark.parametrize("view", one_of_each_kind(), ids=lambda view: view.name)
def test_every_kind_of_view_exports_with_a_free_batch_size(view, images):
    class Model(torch.nn.Module):
        def forward(self, batch):
            return view(batch)

    free = torch.export.Dim("n", min=1, max=1024)
    program = torch.export.export(Model(), (images,), dynamic_shapes=({0: free},)).module()
    more = torch.rand(9, 3, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(program(more), view(more), rtol=0, atol=1e-6)


def test_tensors_stay_on_their_device():
    elsewhere = torch.empty(2, 3, HEIGHT, WIDTH, device="meta")  # a device whose tensors mix with no other's
    pool = np.zeros((4, 3, HEIGHT, WIDTH))
    drawing = [GaussianNoise(0.1), Mixup(0.5, pool), CutMix(0.5, pool), FeatureDropout(0.5)]
    for view in [*one_of_each_kind(), *drawing]:
        result = view(elsewhere, RowStreams(0, view.name, 0, range(2)))
        assert result.device.type == "meta", view.name


def test_names_are_readable_and_the_sets_have_the_identity():
    assert Rotate(15).name == "rotate(+15)"
    assert Rotate(-7.5, "zeros").name == "rotate(-7.5,zeros)"
    assert Rotate90(3).name == "rotate90(+270)"
    assert Shift(0.1, 0).name == "shift(+0.1,0)"
    assert Crop("center").name == "crop(center,0.875)"
    assert [view.name for view in flips()] == ["identity", "hflip", "vflip", "hflip+vflip"]
    views = as_views(standard_images())
    assert len(views) >= 16
    for collection in (flips(), d4(), standard_images()):
        assert as_views(collection)[0].name == "identity"
    assert not any(view.stochastic for view in views)
    assert Brightness(0.1, mean=(0.5,), std=(0.2,)).name == "brightness(+0.1)"


def test_kornia_modules_become_views(images):
    fixed = as_view(kornia.geometry.transform.Hflip(), "mirror")
    assert not fixed.stochastic
    torch.testing.assert_close(fixed(images), images.flip(-1))
    drawing = as_view(kornia.augmentation.RandomAffine(30.0, p=1.0))
    assert drawing.stochastic
    assert drawing.name == "RandomAffine"
    check_rows_are_seeded(drawing, images)
    always = as_view(kornia.augmentation.RandomHorizontalFlip(p=1.0), stochastic=False)
    torch.testing.assert_close(always(images), images.flip(-1))


def test_albumentations_transforms_become_views(images):
    view = as_view(albumentations.RandomBrightnessContrast(p=1.0))
    assert view.stochastic
    check_rows_are_seeded(view, images)
    check_rows_are_seeded(view, images.numpy())
    mirror = as_view(albumentations.HorizontalFlip(p=1.0), "mirror", stochastic=False)
    torch.testing.assert_close(mirror(images), images.flip(-1))
    with pytest.raises(ValueError, match=r"view mirror takes images \(N, C, H, W\)"):
        mirror(images[:, 0])


def test_albumentations_transforms_take_lists_of_images():
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 255, (8 + i, 6, 3), dtype=np.uint8) for i in range(3)]
    pictures = [Image.fromarray(array) for array in arrays]
    mirror = as_view(albumentations.HorizontalFlip(p=1.0), "mirror")

    def left(batch):
        return [float(np.asarray(picture)[:, 0].sum()) for picture in batch]

    predictions = collect_views(left, pictures, [Identity(), mirror])
    np.testing.assert_array_equal(predictions.outputs[:, 1, 0], [array[:, -1].sum() for array in arrays])
    by_channel = [np.moveaxis(array, -1, 0).astype(np.float32) for array in arrays]  # (C, H, W)
    predictions = collect_views(lambda batch: [float(image[:, :, 0].sum()) for image in batch], by_channel, [mirror])
    np.testing.assert_array_equal(predictions.outputs[:, 0, 0], [array[:, -1].sum() for array in arrays])


def check_rows_are_seeded(view, images):
    """The numbers of a row follow from the seed, and torch's own generator is left as it was."""
    before = torch.random.get_rng_state()
    whole = np.asarray(view(images, RowStreams(0, view.name, 0, range(5))))
    assert torch.equal(torch.random.get_rng_state(), before)
    pieces = [np.asarray(view(images[i : i + 1], RowStreams(0, view.name, 0, [i]))) for i in range(5)]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    assert not np.array_equal(whole, np.asarray(view(images, RowStreams(0, view.name, 1, range(5)))))
    with pytest.raises(ValueError, match="call it with rng=RowStreams"):
        view(images)


def test_a_torch_module_becomes_a_view(images):
    view = as_view(torch.nn.AvgPool2d(3, 1, 1), "smooth")
    assert not view.stochastic
    assert view(images).shape == images.shape


def test_a_module_with_random_parts_draws_from_the_rows_streams(images):
    view = as_view(torch.nn.Sequential(torch.nn.Identity(), kornia.augmentation.RandomHorizontalFlip(p=0.5)), "maybe")
    assert view.stochastic
    rows = np.arange(len(images))
    whole = view(images, RowStreams(0, view.name, 0, rows))
    last = view(images[1:], RowStreams(0, view.name, 0, rows[1:]))
    torch.testing.assert_close(whole[1:], last)


def test_ttach_compose_expands_to_its_views(images):
    compose = ttach.Compose([ttach.HorizontalFlip(), ttach.Rotate90([0, 90]), ttach.Multiply([0.9, 1])])
    views = as_views(compose)
    assert [view.name for view in views] == [
        "Multiply(0.9)",
        "identity",
        "Rotate90(90)+Multiply(0.9)",
        "Rotate90(90)",
        "HorizontalFlip+Multiply(0.9)",
        "HorizontalFlip",
        "HorizontalFlip+Rotate90(90)+Multiply(0.9)",
        "HorizontalFlip+Rotate90(90)",
    ]
    for view, transformer in zip(views, compose, strict=True):
        torch.testing.assert_close(view(images), transformer.augment_image(images))
    mixed = as_views([Zoom(1.1), compose])
    assert len(mixed) == 9
    with pytest.raises(TypeError, match="Compose stands for several views; use as_views"):
        as_view(compose)
    crops = as_views(ttach.Compose([ttach.FiveCrops(8, 8)]))
    assert crops[0].name == "FiveCrops(crop_lt)"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rotate90(0), "quarters must be 1, 2 or 3; got 0"),
        (lambda: Rotate(float("nan")), "Rotate: degrees must be a finite number; got nan"),
        (lambda: Rotate(5, "mirror"), "padding must be one of reflection, border, zeros; got 'mirror'"),
        (lambda: Zoom(0), "Zoom: factor must be a finite number above 0"),
        (lambda: Shift(1.0, 0.0), "Shift: x must be a finite number above -1 and below 1; got 1.0"),
        (lambda: Crop("middle"), "position must be one of"),
        (lambda: Crop("center", 1.5), "scale must be a finite number above 0 and below 1; got 1.5"),
        (lambda: Blur(0), "Blur: sigma"),
        (lambda: Brightness(0.1, mean=(0.5,)), "give both mean and std"),
        (lambda: Gamma(1.1, mean=(0.5,), std=(0.0,)), "std positive"),
        (
            lambda: HorizontalFlip()(torch.zeros(3, 4, 4)),
            r"takes images \(N, C, H, W\) or volumes .*; got shape \(3, 4, 4\)",
        ),
        (lambda: Blur(3.0)(torch.zeros(1, 1, 9, 30)), "needs images larger than 9 pixels"),
        (
            lambda: Gamma(2.0, mean=(0.5,), std=(0.2,))(torch.zeros(1, 3, 4, 4)),
            "1 channels; the images have 3",
        ),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_whole_numbers_are_flipped_but_not_interpolated():
    pixels = torch.arange(6, dtype=torch.uint8).reshape(1, 1, 2, 3)
    assert Chain([HorizontalFlip(), HorizontalFlip()])(pixels).equal(pixels)
    with pytest.raises(TypeError, match=r"needs floating-point inputs; got torch.uint8.*divide by 255"):
        Rotate(5)(pixels)


@pytest.mark.parametrize("padding", ["reflection", "border", "zeros"])
def test_the_largest_shift_of_a_small_image_leaves_a_pixel(padding):
    images = torch.arange(1.0, 13.0).reshape(1, 1, 3, 4)
    shifted = Shift(0.99, -0.99, padding)(images)
    assert shifted.shape == images.shape
    assert shifted[0, 0, 0, -1] == images[0, 0, -1, 0]
    torch.testing.assert_close(Shift(0.9, 0.9)(torch.ones(1, 1, 1, 1)), torch.ones(1, 1, 1, 1))


def test_a_whole_float_of_quarters_is_a_number_of_quarters():
    assert Rotate90(1.0) == Rotate90(1)
    assert Rotate90(1.0).name == "rotate90(+90)"
    with pytest.raises(ValueError, match="quarters"):
        Rotate90(True)
