"""From what the command line names to a config and a random model of it, without a network."""

import difflib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, PreTrainedModel

from pp_recipe.options import OptionsError

# Without a class named in the config, the first of these that knows it makes the model.
_DEFAULT_MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_MAPPING",
)


def reason(error: BaseException) -> str:
    """Return an error as one line: its type, what it says and where it was raised."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(lines)[:500]}{where}"


def import_user_code(name: str) -> None:
    """Import a module, or a file by its path, so that it can register its own architecture.

    Raises:
        OptionsError: If there is none, or it fails.
    """
    path = Path(name)
    try:
        if path.suffix != ".py":
            sys.path.insert(0, str(Path.cwd()))
            importlib.import_module(name)
            return
        if not path.is_file():
            raise OptionsError([f"--import {name}: there is no such file"])
        sys.path.insert(0, str(path.resolve().parent))  # as Python does for a program
        module_name = f"imported_{path.stem}" if path.stem in sys.modules else path.stem
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except OptionsError:
        raise
    except Exception as error:
        raise OptionsError([f"--import {name}: {reason(error)}"]) from error


def resolve_config(model: str, trust_remote_code: bool) -> PretrainedConfig:
    """Return the config that a folder, a hub id in the cache or a model type stands for.

    Raises:
        OptionsError: If there is none, or if it needs code of its own that is not trusted.
    """
    folder = Path(model)
    if not folder.is_dir():
        if model in CONFIG_MAPPING:
            try:
                return AutoConfig.for_model(model)
            except Exception as error:
                raise OptionsError([f"{model}: {reason(error)}"]) from error
        folder = _cached_folder(model)
    try:
        values, _ = PretrainedConfig.get_config_dict(str(folder), local_files_only=True)
    except Exception as error:
        raise OptionsError([f"{model} has no config.json that can be read: {error}"]) from error
    model_type = values.get("model_type")
    if model_type not in CONFIG_MAPPING:
        has_code = "AutoConfig" in (values.get("auto_map") or {})
        if has_code and not trust_remote_code:
            raise OptionsError(
                [
                    f"{model} brings its own code for model type {model_type!r}, which is run only "
                    "with --trust-remote-code: read it first"
                ]
            )
        if not has_code:
            raise OptionsError(
                [
                    f"config.json of {model} has model_type {model_type!r}, which the installed "
                    f"Transformers does not know{_near(str(model_type))}. If it is your own, name "
                    "the file that registers it: --import FILE.py"
                ]
            )
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except Exception as error:
        raise OptionsError([f"config of {model}: {reason(error)}"]) from error
    assert isinstance(config, PretrainedConfig)
    return config


def build_random_model(config: PretrainedConfig, trust_remote_code: bool) -> PreTrainedModel:
    """Return a float32 model in evaluation mode, with noise on all parameters.

    The first of `config.architectures` decides the class; without it, it is the causal language
    model. Norms start as ones and biases as zeros, under which many a fault would not show, so
    noise is added to everything.

    Raises:
        OptionsError: If there is no such class, or it cannot be built.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            model = construct(config, trust_remote_code)
            model.float().eval()
        except OptionsError:
            raise
        except Exception as error:
            raise OptionsError([f"no model can be made: {reason(error)}"]) from error
        with torch.no_grad():
            for parameter in model.parameters():
                width = parameter.shape[-1] if parameter.ndim > 1 else 100
                if parameter.is_floating_point():
                    parameter.add_(torch.randn_like(parameter) * max(width, 1) ** -0.5)
    return model


def construct(config: PretrainedConfig, trust_remote_code: bool) -> PreTrainedModel:
    """Return the model that a config means: the first of its architectures, or a causal one.

    Raises:
        OptionsError: If there is no such class.
    """
    wanted = next(iter(config.architectures or ()), None)
    remote: dict[str, str] = getattr(config, "auto_map", None) or {}
    if trust_remote_code and remote:
        names = [name for name in remote if name.startswith("AutoModel")]
        fitting = [name for name in names if remote[name].rpartition(".")[2] == wanted]
        for auto in [*fitting, "AutoModelForCausalLM", *names]:
            if auto in names:
                made = getattr(transformers, auto).from_config(config, trust_remote_code=True)
                assert isinstance(made, PreTrainedModel)
                return made
    if wanted is None:
        classes = [cls for name in _DEFAULT_MAPPINGS for cls in _classes(name, config)]
    else:
        names = [n for n in dir(transformers) if n.startswith("MODEL_") and n.endswith("MAPPING")]
        every = [cls for name in names for cls in _classes(name, config)]
        every += [getattr(transformers, wanted, None)]
        classes = [cls for cls in every if getattr(cls, "__name__", None) == wanted]
    if not classes:
        missing = f" named {wanted} (architectures in its config)" if wanted else ""
        raise OptionsError([f"there is no model class{missing} for {type(config).__name__}"])
    # Some decoders of a multimodal model take the config of the decoder alone.
    text_class = config.sub_configs.get("text_config")
    takes_text = text_class is not None and classes[0].config_class is text_class
    made = classes[0]._from_config(config.get_text_config() if takes_text else config)
    assert isinstance(made, PreTrainedModel)
    return made


def _classes(mapping: str, config: PretrainedConfig) -> Sequence[Any]:
    found = getattr(transformers, mapping, {}).get(type(config), ())
    return found if isinstance(found, tuple | list) else (found,)


def _cached_folder(model: str) -> Path:
    try:
        return Path(hf_hub_download(model, "config.json", local_files_only=True)).parent
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise OptionsError(
            [
                f"{model} is neither a folder here, nor a model type of the installed "
                f"Transformers{_near(model)}, nor a model in this machine's cache of the hub"
            ]
        ) from error


def _near(model_type: str) -> str:
    near = difflib.get_close_matches(model_type, CONFIG_MAPPING.keys(), n=3)
    return f" (did you mean {' or '.join(near)}?)" if near else ""
