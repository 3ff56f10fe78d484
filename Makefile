# The one door: each target is a script of tools/ or one call of it. BUILD is the build folder.
BUILD ?= build
export BUILD

.PHONY: help all demo test test-gpu bench golden format format-check install clean

help:
	@echo 'make demo      build, then run a layer of Llama 3 8B, on the GPU if there is one'
	@echo 'make test      build and run the whole suite, without a GPU'
	@echo 'make test-gpu  run the GPU suite and write tests/gpu/receipt.txt'
	@echo 'make bench     run the benchmarks of tests/bench on the GPU'
	@echo 'make all       build the libraries, the program, the examples and the tests'
	@echo 'make install   install into PREFIX (default /usr/local)'
	@echo 'make golden    rewrite golden files and the outputs in the README from the program'
	@echo 'make format    lay out the sources with clang-format 14'
	@echo 'make clean     remove the build folder'
	@echo
	@echo 'BUILD=dir      build folder (build)     FP8GEN_SANITIZE=address,undefined|thread'
	@echo 'FP8GEN_NO_BUILD=1  run what lies in BUILD, build nothing'

demo:
	@tools/demo.sh

test:
	@tools/test.sh cpu

test-gpu:
	@tools/test.sh gpu

bench:
	@tools/bench.sh

all:
	@tools/build.sh all

install:
	@tools/build.sh all
	cmake --install $(BUILD) $(if $(PREFIX),--prefix $(PREFIX))

golden:
	@tools/build.sh all
	@bash tests/golden/update.sh
	@FP8_TEST_UPDATE=1 $(BUILD)/tests/house_readme
	@FP8_TEST_UPDATE=1 FP8GEN=$(abspath $(BUILD))/bin/fp8gen bash tests/house/test_readme_commands.sh

format:
	@tools/format.sh

format-check:
	@tools/format.sh --check

clean:
	rm -rf $(BUILD)
