"""The model card that pack writes beside the weights: the template's blanks filled from the checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from .formats import FORMAT_VERSION, FourBitSpec, WeightSpec
from .sizes import format_size

# Front-matter fields of the source's card that stay true of a packed copy.
_INHERITED = ("license", "license_name", "license_link", "language", "pipeline_tag", "datasets")


def render_card(
    *,
    source_card: Path,
    source_name: str,
    config: Mapping[str, Any],
    specs: Mapping[str, WeightSpec],
    source_format: str,
    bytes_before: int,
    bytes_after: int,
) -> str:
    """README.md text of a packed checkpoint; holds no figure that was not counted from the files."""
    front = _front_matter(source_card)
    base = front.get("base_model") or source_name
    quantized = sum(spec.n * spec.k for spec in specs.values())
    bits = sorted({"4-bit" if isinstance(spec, FourBitSpec) else "8-bit" for spec in specs.values()})
    header = {key: front[key] for key in _INHERITED if key in front} | {
        "base_model": base,
        "library_name": "transformers",
        "tags": ["nf4linear", *bits],
    }
    template = Template(resources.files(__package__).joinpath("model_card.md").read_text(encoding="utf-8"))
    return template.substitute(
        front_matter=_yaml(header),
        title=source_name.rstrip("/").split("/")[-1],
        source=source_name,
        architecture=architecture_names(config),
        made_from="a bitsandbytes checkpoint, codes and scales unchanged"
        if source_format == "bitsandbytes"
        else "a 16/32-bit checkpoint, quantized by `nf4linear pack`",
        formats="\n".join(f"| {what} | {count} |" for what, count in count_formats(specs).items()),
        format_version=FORMAT_VERSION,
        parameters=f"{quantized:,}",
        size_quantized=format_size(
            sum(tensor.nbytes() for spec in specs.values() for tensor in spec.packed_tensors().values())
        ),
        size_before=format_size(bytes_before),
        size_after=format_size(bytes_after),
    )


def architecture_names(config: Mapping[str, Any]) -> str:
    """The classes that a config.json names."""
    names = config.get("architectures")
    return ", ".join(map(str, names)) if isinstance(names, list) and names else "unknown"


def count_formats(specs: Mapping[str, WeightSpec]) -> dict[str, int]:
    """Formats in words -> layers that have them, the commonest first."""
    return dict(Counter(_describe(spec) for spec in specs.values()).most_common())


def _describe(spec: WeightSpec) -> str:
    if isinstance(spec, FourBitSpec):
        scales = "double quantization" if spec.double_quant else "float32 scales"
        return f"{spec.format}, blocksize {spec.blocksize}, {scales}"
    return f"{spec.format}, " + ("one scale a row" if spec.group_size is None else f"group size {spec.group_size}")


def _front_matter(card: Path) -> dict[str, Any]:
    """YAML header of a model card; empty when there is none or it cannot be read, which must not stop a pack."""
    import yaml

    try:
        _, header, _ = card.read_text(encoding="utf-8").split("---", 2)
        fields = yaml.safe_load(header)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _yaml(fields: Mapping[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(dict(fields), sort_keys=False, allow_unicode=True).strip()
