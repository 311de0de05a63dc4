"""The accuracy of a run on CIFAR-10-C: python examples/corruptions.py runs/speed94-seed0

TensorFlow Datasets first downloads the corrupted images, 2.7 GiB.
"""

import sys

import cifar_towers

CORRUPTIONS = ("brightness", "fog", "gaussian_noise", "motion_blur", "pixelate")
SEVERITIES = (1, 3, 5)


def main(directory):
    run = cifar_towers.load_run(directory)
    for corruption in CORRUPTIONS:
        for severity in SEVERITIES:
            name = f"cifar10_corrupted/{corruption}_{severity}"
            score = run.evaluate(dataset=name)
            print(f"{name}: {100 * score['accuracy']:.2f} %")


if __name__ == "__main__":
    main(sys.argv[1])
