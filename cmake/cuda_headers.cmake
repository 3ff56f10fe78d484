# Finds the folder that holds cuda.h, nvrtc.h and cublasLt.h; sets FP8GEN_CUDA_INCLUDE_DIR and
# FP8GEN_CUDA_VERSION. FindCUDAToolkit wants nvcc; the headers are all that is needed here.
# Searched: FP8GEN_CUDA_INCLUDE_DIR, CUDAToolkit_ROOT, CUDA_HOME, CUDA_PATH, the toolkit of an nvcc
# on PATH, /usr/local/cuda, /usr/local/cuda-*, /opt/cuda, then the system's include folders.
set(FP8GEN_CUDA_MINIMUM 12.1)

find_program(FP8GEN_NVCC nvcc)
mark_as_advanced(FP8GEN_NVCC)
set(cuda_roots ${CUDAToolkit_ROOT} $ENV{CUDAToolkit_ROOT} $ENV{CUDA_HOME} $ENV{CUDA_PATH})
if(FP8GEN_NVCC)
    get_filename_component(nvcc_path "${FP8GEN_NVCC}" REALPATH)
    get_filename_component(nvcc_root "${nvcc_path}" DIRECTORY)
    get_filename_component(nvcc_root "${nvcc_root}" DIRECTORY)
    list(APPEND cuda_roots "${nvcc_root}")
endif()
file(GLOB versioned_roots /usr/local/cuda-*)
list(SORT versioned_roots COMPARE NATURAL ORDER DESCENDING)
list(APPEND cuda_roots /usr/local/cuda ${versioned_roots} /opt/cuda)
list(REMOVE_DUPLICATES cuda_roots)

find_path(FP8GEN_CUDA_INCLUDE_DIR
    NAMES cublasLt.h
    HINTS ${cuda_roots}
    PATH_SUFFIXES include targets/${CMAKE_SYSTEM_PROCESSOR}-linux/include
    DOC "Folder with cuda.h, nvrtc.h and cublasLt.h")

set(missing_headers)
foreach(header cuda.h nvrtc.h cublasLt.h)
    if(NOT EXISTS "${FP8GEN_CUDA_INCLUDE_DIR}/${header}")
        list(APPEND missing_headers ${header})
    endif()
endforeach()
if(missing_headers)
    list(JOIN missing_headers ", " missing_headers)
    list(JOIN cuda_roots ", " cuda_roots)
    message(FATAL_ERROR "No CUDA toolkit: ${missing_headers} not found.\n"
        "Searched ${cuda_roots} and the system's include folders.\n"
        "Install the CUDA toolkit (${FP8GEN_CUDA_MINIMUM} or newer; "
        "https://developer.nvidia.com/cuda-downloads), or, where it lies elsewhere, set CUDA_PATH "
        "to its folder.")
endif()

file(STRINGS "${FP8GEN_CUDA_INCLUDE_DIR}/cuda.h" version_line REGEX "^#define CUDA_VERSION [0-9]+")
string(REGEX MATCH "[0-9]+" version_number "${version_line}")
math(EXPR version_major "${version_number} / 1000")
math(EXPR version_minor "${version_number} % 1000 / 10")
set(FP8GEN_CUDA_VERSION "${version_major}.${version_minor}")
if(FP8GEN_CUDA_VERSION VERSION_LESS FP8GEN_CUDA_MINIMUM)
    message(FATAL_ERROR "CUDA ${FP8GEN_CUDA_VERSION} in ${FP8GEN_CUDA_INCLUDE_DIR} is too old: "
        "fp8gen needs CUDA ${FP8GEN_CUDA_MINIMUM} or newer. Set CUDA_PATH to a newer toolkit.")
endif()
message(STATUS "CUDA headers: ${FP8GEN_CUDA_INCLUDE_DIR} (CUDA ${FP8GEN_CUDA_VERSION})")
