"""Send an engine requests with an image, of which the first is refused.

    python pictured.py MODEL_DIR OUT.json

MODEL_DIR is not used: the program generates a multimodal model. OUT.json has the finish reason and
the token ids of two requests after the refused one, and of one with the image in other pixels.
"""

import json
import sys
from pathlib import Path
from typing import Any

from demo.model import write_tokenizer
from PIL import Image
from vllm import LLM, SamplingParams

SIDE, VOCABULARY = 28, 1024
#: The last token; the words of the demo's tokenizer are the others.
IMAGE_TOKEN = VOCABULARY - 1


def write_model(folder: Path) -> Path:
    """Write the configuration and the processor of a tiny BLIP-2, which needs no weights."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 64}
    vision = {"intermediate_size": 128, "image_size": SIDE, "patch_size": 14, "hidden_act": "gelu"}
    text = {
        "model_type": "opt",
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "word_embed_proj_dim": 128,
        "ffn_dim": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "torch_dtype": "bfloat16",
    }
    config = {
        "architectures": ["Blip2ForConditionalGeneration"],
        "model_type": "blip-2",
        "text_config": text,
        "vision_config": {"model_type": "blip_2_vision_model", **sizes, **vision},
        "qformer_config": {
            **{"model_type": "blip_2_qformer", "vocab_size": VOCABULARY, **sizes},
            **{"intermediate_size": 128, "encoder_hidden_size": 64, "cross_attention_frequency": 1},
        },
        "num_query_tokens": 4,
        "image_token_index": IMAGE_TOKEN,
        "torch_dtype": "bfloat16",
    }
    write_tokenizer(folder, IMAGE_TOKEN)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["<image>"] = IMAGE_TOKEN
    image = {"id": IMAGE_TOKEN, "content": "<image>", "special": True, "normalized": False}
    image |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    tokenizer["added_tokens"] = [image]
    processor = {
        "image_processor_type": "BlipImageProcessor",
        "processor_class": "Blip2Processor",
        "size": {"height": SIDE, "width": SIDE},
    }
    files: dict[str, Any] = {
        "config": config,
        "tokenizer": tokenizer,
        "preprocessor_config": processor,
        "processor_config": {"processor_class": "Blip2Processor", "num_query_tokens": 4},
    }
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def main(out: Path) -> None:
    """Serve the requests one after the other."""
    llm = LLM(
        str(write_model(out.with_suffix(".model"))),
        load_format="dummy",
        max_model_len=64,
        enforce_eager=True,
        gpu_memory_utilization=0.3,
    )

    def serve(image: Image.Image, **params: Any) -> Any:
        prompt: Any = {"prompt": "t9 t10 t11", "multi_modal_data": {"image": image}}
        sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, **params)
        try:
            reply = llm.generate(prompt, sampling, use_tqdm=False)[0].outputs[0]
        except ValueError as error:
            return str(error)
        return [reply.finish_reason, list(reply.token_ids)]

    red, blue = (Image.new("RGB", (SIDE, SIDE), color) for color in ("red", "blue"))
    report = {
        "refused": serve(red, logprobs=99),
        "later": [serve(red), serve(red)],
        "other": serve(blue),
    }
    out.write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[2]))
