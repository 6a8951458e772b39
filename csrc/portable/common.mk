# Shared by the three platforms' Makefiles, which set SOURCE and the platform's own compile command PLATFORM_BUILD.
#
#   make         the platform's compiler
#   make cuda    nvcc, the platform's runtime names mapped onto CUDA (compat/)
#   make host    a host compiler, the grid as loops (host/)
PORTABLE := $(dir $(lastword $(MAKEFILE_LIST)))
BUILD ?= build
CXX ?= c++
NVCC ?= nvcc
CUDA_ARCH ?= native
HEADERS := $(wildcard $(PORTABLE)*.h $(PORTABLE)*/*.h $(PORTABLE)../lab/*.h $(PORTABLE)../*.h)

.PHONY: platform cuda host clean
platform: $(BUILD)/nf4_dequant
cuda: $(BUILD)/nf4_dequant_cuda
host: $(BUILD)/nf4_dequant_host

$(BUILD):
	mkdir -p $@

$(BUILD)/nf4_dequant: $(SOURCE) $(HEADERS) | $(BUILD)
	$(PLATFORM_BUILD) -o $@

$(BUILD)/nf4_dequant_cuda: $(SOURCE) $(HEADERS) | $(BUILD)
	$(NVCC) -O3 -std=c++17 -arch=$(CUDA_ARCH) -fmad=false -I$(PORTABLE)compat -x cu $(SOURCE) -o $@

$(BUILD)/nf4_dequant_host: $(SOURCE) $(HEADERS) | $(BUILD)
	$(CXX) -O2 -std=c++17 -Wall -Wextra -ffp-contract=off -I$(PORTABLE)host -I$(PORTABLE)compat -x c++ $(SOURCE) -o $@

clean:
	rm -rf $(BUILD)
