"""Train a small image model on the digits 0 to 4, then probe every layer on the digits 5 to 9, which it has never seen.

python examples/image_probes.py [EPOCHS]
"""

import sys

import torch
from PIL import Image
from sklearn.datasets import load_digits
from transformers import ViTConfig, ViTImageProcessorPil, ViTModel

from midlayer_encoders import LayerEncoder, probe

digits = load_digits()
small = [Image.fromarray((pixels * 15.9375).astype("uint8")) for pixels in digits.images]
images = [image.resize((16, 16), Image.Resampling.BICUBIC).convert("RGB") for image in small]
known = [row for row, digit in enumerate(digits.target) if digit < 5]
unknown = [row for row, digit in enumerate(digits.target) if digit >= 5][::3]

torch.manual_seed(0)
processor = ViTImageProcessorPil(size={"height": 16, "width": 16})
pixels = processor([images[row] for row in known], return_tensors="pt")["pixel_values"]
labels = torch.tensor(digits.target[known])
config = ViTConfig(
    image_size=16, patch_size=4, hidden_size=96, num_hidden_layers=6, num_attention_heads=4, intermediate_size=384
)
model = ViTModel(config)
classifier = torch.nn.Linear(96, 5)
optimizer = torch.optim.AdamW([*model.parameters(), *classifier.parameters()], lr=5e-4, weight_decay=0.05)
for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 5):
    for batch in torch.randperm(len(pixels)).split(64):
        means = model(pixel_values=pixels[batch]).last_hidden_state.mean(dim=1)
        loss = torch.nn.functional.cross_entropy(classifier(means), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
model.save_pretrained("digit-model")
processor.save_pretrained("digit-model")

encoder = LayerEncoder("digit-model", -1, device="cpu")
for kind in ("attentive", "linear"):
    result = probe(
        encoder, [images[row] for row in unknown], digits.target[unknown].tolist(), kind=kind, dataset="digits"
    )
    print(result.verdict())
    print("The report:", result.save(f"digits-{kind}") / "report.html")
