"""Models, processors, data sets and the Hub's folders of Hugging Face; tiny models without trained weights."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from vbtta import LabelSets, Policy, TTAModule, ViewPredictions, collect_views, fit_policy
from vbtta.augment import GaussianNoise, HorizontalFlip, Identity, as_view
from vbtta.augment.text import Case, WordDropout

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
from vbtta.integrations.huggingface import ProcessedPredictor  # noqa: E402

LAYERS = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
SMALL = {**LAYERS, "num_labels": 3, "initializer_range": 0.5}  # a large range, so that views differ
IMAGES = torch.rand(24, 3, 16, 16, generator=torch.Generator().manual_seed(0))
LABELS = np.arange(24) % 3
VIEWS = [Identity(), HorizontalFlip(), GaussianNoise(0.1)]


@pytest.fixture(scope="module")
def vit():
    torch.manual_seed(0)
    return transformers.ViTForImageClassification(transformers.ViTConfig(image_size=16, patch_size=4, **SMALL))


@pytest.fixture(scope="module")
def bert():
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=60, **SMALL)).eval()


@pytest.fixture(scope="module")
def pictures():
    from PIL import Image

    arrays = (255 * IMAGES.permute(0, 2, 3, 1)).numpy().astype(np.uint8)
    return [Image.fromarray(array) for array in arrays]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "plot", "a", "the"]
    path = tmp_path_factory.mktemp("words") / "vocab.txt"
    path.write_text("\n".join(words))
    return transformers.BertTokenizer(str(path))


def sources():
    rows = datasets.Dataset.from_dict({"pixel_values": IMAGES.tolist(), "label": LABELS.tolist()})
    torched = rows.with_format("torch")
    return {
        "dict": {"pixel_values": IMAGES, "labels": torch.tensor(LABELS)},
        "BatchFeature": transformers.BatchFeature({"pixel_values": IMAGES.numpy()}),
        "Dataset": rows,
        "torch": torched,
        "numpy": rows.with_format("numpy"),
        "streaming": rows.to_iterable_dataset(),
        "streaming torch": torched.to_iterable_dataset(),
        "DataLoader": DataLoader(torched, batch_size=7),
        "batches": iter([transformers.BatchFeature({"pixel_values": part}) for part in IMAGES.split(10)]),
        "rows": [torched[i] for i in range(24)],
    }


@pytest.mark.parametrize("source", list(sources()))
def test_all_inputs_give_the_same_predictions(vit, source):
    expected = collect_views(lambda batch: vit(batch).logits.detach(), IMAGES, VIEWS)
    for key in (None, "pixel_values"):
        predictions = collect_views(vit, sources()[source], VIEWS, batch_size=10, key=key)
        np.testing.assert_allclose(predictions.outputs, expected.outputs, atol=1e-5)


def test_a_wrapped_model_takes_what_the_model_takes(vit):
    predictions = collect_views(vit, {"pixel_values": IMAGES}, VIEWS)
    policy = fit_policy(predictions, LABELS, task="classification", guard=False)
    expected = policy.predict(predictions).proba
    module, batch = TTAModule(vit, VIEWS, policy), transformers.BatchFeature({"pixel_values": IMAGES})
    for proba in (
        module(IMAGES),
        module(batch),
        module(**batch),
        TTAModule(vit, VIEWS, policy, key="pixel_values")(batch),
    ):
        np.testing.assert_allclose(proba.detach(), expected, atol=1e-5)
    with pytest.raises(ValueError, match="key='image' is not among the parts of the batch: 'pixel_values'"):
        TTAModule(vit, VIEWS, policy, key="image")(batch)


def test_a_text_classifier_with_views_of_tokens(bert):
    ids = torch.randint(5, 60, (24, 7), generator=torch.Generator().manual_seed(1))
    batch = transformers.BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    def masked(tokens, rng):
        return torch.where(torch.from_numpy(rng.random(size=tokens.shape) < 0.2), 4, tokens)

    views = [Identity(), as_view(masked)]
    predictions = collect_views(bert, batch, views, key="input_ids", batch_size=5)
    assert np.abs(predictions.outputs[:, 0] - predictions.outputs[:, 1]).max() > 1e-4
    policy = fit_policy(predictions, LABELS, task="classification", model="mixture", guard=False)
    module = TTAModule(bert, views, policy, key="input_ids")
    np.testing.assert_allclose(module(**batch).detach(), policy.predict(predictions).proba, atol=1e-5)


def test_an_audio_classifier():
    torch.manual_seed(0)
    layers = {"conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 8), "num_feat_extract_layers": 2}
    config = transformers.Wav2Vec2Config(
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, classifier_proj_size=8, **layers, **SMALL
    )
    model = transformers.Wav2Vec2ForSequenceClassification(config)
    signals = np.random.default_rng(0).normal(size=(6, 400)).astype(np.float32)
    views = [Identity(), GaussianNoise(0.1)]
    raw = collect_views(model, {"input_values": torch.from_numpy(signals)}, views)
    extractor = transformers.Wav2Vec2FeatureExtractor(do_normalize=False)
    predictor = ProcessedPredictor(model, extractor, sampling_rate=16000)
    np.testing.assert_allclose(collect_views(predictor, signals, views, batch_size=4).outputs, raw.outputs, atol=1e-5)
    ragged = [signal[: 200 + 30 * row] for row, signal in enumerate(signals)]
    padded = ProcessedPredictor(model, extractor, sampling_rate=16000, padding=True)
    assert collect_views(padded, ragged, [Identity()], batch_size=1).outputs.shape == (6, 1, 3)


def test_views_of_pictures_in_front_of_a_processor(vit, pictures):
    processor = transformers.ViTImageProcessor(size={"height": 16, "width": 16})
    views = [Identity(), as_view(lambda batch: [picture.rotate(90) for picture in batch], name="turned")]
    predictor = ProcessedPredictor(vit, processor)
    turned = [picture.rotate(90) for picture in pictures]
    with torch.no_grad():
        expected = [vit(**processor(batch, return_tensors="pt")).logits for batch in (pictures, turned)]
    table = datasets.Dataset.from_dict({"image": pictures, "label": LABELS.tolist()})
    for inputs in (pictures, table, table["image"], table.to_iterable_dataset()):
        outputs = collect_views(predictor, inputs, views, batch_size=10).outputs
        np.testing.assert_allclose(outputs, torch.stack(expected, dim=1), atol=1e-5)
    with pytest.raises(ValueError, match="which of the columns"):
        collect_views(ProcessedPredictor(vit, processor, key="picture"), table, views)


def test_views_of_texts_in_front_of_a_tokenizer(bert, tokenizer):
    texts = ["a good film", "the bad plot", "good", "the film a good plot"] * 3
    bert.config.id2label = {0: "poor", 1: "fair", 2: "fine"}
    table = datasets.Dataset.from_dict({"text": texts, "label": [0] * 12})
    predictor = ProcessedPredictor(bert, tokenizer)
    predictions = collect_views(predictor, table, [Identity(), Case("upper"), WordDropout(0.5)], batch_size=5)
    assert predictions.classes.tolist() == ["poor", "fair", "fine"]
    with torch.no_grad():
        expected = torch.cat([bert(**tokenizer(text, return_tensors="pt")).logits for text in texts])
    np.testing.assert_allclose(predictions.outputs[:, 0], expected, atol=1e-5)
    assert np.abs(predictions.outputs[:, 2] - predictions.outputs[:, 0]).max() > 1e-4
    pipeline = transformers.pipeline("text-classification", model=bert, tokenizer=tokenizer)
    with pytest.raises(TypeError, match=r"is a pipeline of transformers: give ProcessedPredictor\(p\.model, p\.token"):
        collect_views(pipeline, texts, [Identity()])


def test_other_columns_of_a_data_set_are_left_alone(vit):
    table = datasets.Dataset.from_dict({"pixel_values": IMAGES.tolist(), "file": [f"{i}.png" for i in range(24)]})
    expected = collect_views(vit, IMAGES, VIEWS).outputs
    for rows in (table, table.to_iterable_dataset(), table.with_format("torch")):
        np.testing.assert_allclose(collect_views(vit, rows, VIEWS, batch_size=10).outputs, expected, atol=1e-5)
    with pytest.raises(TypeError, match="does not take the parts picture, file; give one of them"):
        collect_views(vit, table.rename_column("pixel_values", "picture"), VIEWS)


def test_a_data_set_is_a_table_of_labels():
    table = datasets.Dataset.from_dict({"id": [f"{i}.png" for i in range(24)], "label": LABELS.tolist()})
    predictions = ViewPredictions(np.zeros((24, 1, 3)), ids=table["id"][:])
    for labels in (table.shuffle(seed=0), LabelSets.from_table(table.shuffle(seed=0))):
        np.testing.assert_array_equal(predictions.align(labels).value, LABELS)


def held_out(task):
    rng = np.random.default_rng(0)
    labels = rng.integers(3, size=300)
    outputs = 2 * np.eye(3)[labels][:, None] + rng.normal(size=(300, 2, 3))
    predictions = ViewPredictions(outputs, names=["identity", "flip"])
    if task == "regression":
        return ViewPredictions(outputs[:, :, :1], names=predictions.names), outputs[:, 0, 0] + 0.1
    return predictions, labels


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_folder_of_the_hub_holds_the_policy_and_a_card(task, tmp_path, monkeypatch):
    predictions, labels = held_out(task)
    policy = fit_policy(predictions, labels, task=task)
    options = {"predictions": predictions, "labels": labels, "data": "Three hundred inputs.", "limits": "Made up."}
    policy.save_pretrained(tmp_path / "policy", **options)
    back = Policy.from_pretrained(tmp_path / "policy")
    np.testing.assert_array_equal(back.weights, policy.weights)
    card = (tmp_path / "policy" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: vbtta\n")
    for text in (f"| flip | {policy.weights[1]:.3f} |", "Three hundred inputs.", "Made up.", policy.guard.reason):
        assert text in card
    assert "![Calibration](calibration.svg)" in card
    assert "<svg" in (tmp_path / "policy" / "calibration.svg").read_text()

    uploaded = {}

    class Api:  # what ModelHubMixin uses of huggingface_hub.HfApi
        def __init__(self, token=None):
            uploaded["token"] = token

        def create_repo(self, repo_id, private, exist_ok):
            return type("Url", (), {"repo_id": repo_id})

        def upload_folder(self, repo_id, folder_path, **options):
            uploaded.update({"repo": repo_id, "files": sorted(path.name for path in folder_path.iterdir())})
            return f"https://huggingface.co/{repo_id}"

    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", Api)
    with pytest.raises(ValueError, match="give predictions and labels, both held out, or neither"):
        policy.save_pretrained(tmp_path / "policy", labels=labels)
    assert policy.push_to_hub("me/weights", token="t", **options).endswith("me/weights")
    assert uploaded == {"token": "t", "repo": "me/weights", "files": ["README.md", "calibration.svg", "policy.json"]}


def test_the_card_of_several_labels_measures_them(tmp_path):
    predictions, labels = held_out("classification")
    present = np.eye(3, dtype=int)[labels]
    policy = fit_policy(predictions, present, task="multilabel", guard=False)
    policy.save_pretrained(tmp_path, predictions=predictions, labels=present)
    right = ((policy.predict(predictions).proba > 0.5) == present).mean()
    assert f"On held-out labels: accuracy {right:.3f}" in (tmp_path / "README.md").read_text()


def test_a_folder_without_a_policy_is_named(tmp_path, caplog):
    predictions, labels = held_out("classification")
    policy = fit_policy(predictions, labels, task="classification", model="mixture", guard=False)
    policy.save_pretrained(tmp_path / "policy")
    Policy.from_pretrained(tmp_path / "policy")
    assert not caplog.records  # as of a configuration that there is not
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "nothing"):
        with pytest.raises(FileNotFoundError, match=f"no .* at {folder}/policy.json"):
            Policy.from_pretrained(folder)
    options: dict[str, object] = {}

    def download(repo, file, **keywords):
        options.update(keywords, repo=repo)
        return tmp_path / "policy" / file

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.hf_hub_download", download)
        np.testing.assert_array_equal(Policy.from_pretrained("me/weights", revision="v1").weights, policy.weights)
    assert options == {"repo": "me/weights", "revision": "v1"}
